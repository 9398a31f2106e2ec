"""Nemotron VL's vision encoder: megatron-core's RADIO on tiles of one size."""

from . import MODELS, Declaration, HubModels, Model, Seams

_NEMOTRON_VL, RADIO = f"{MODELS}.nemotron_vl", "megatron.core.models.vision.radio"
_LAYERS = "self.decoder(x, attention_mask=attention_mask, packed_seq_params=packed_seq_params)"


def radio_seams(name: str, feature: str) -> Seams:
    """Return the seams of RADIO, for a model of this name."""
    from ..registry.engine import CORE_ATTENTION, TE_UTILS, attention_backward, cudnn_version
    from ..seam import called, read, swapped, touched
    from ..tower_seams import FORWARD_OFF

    return (
        cudnn_version(f"{name}_cudnn_version", feature),
        attention_backward(f"{name}_attention_backward", feature),
        swapped(
            f"{name}_split",
            f"{CORE_ATTENTION}:SplitAlongDim",
            "gradients that attention wrote side by side are not copied",
            feature,
            kind="value",
        ),
        called(
            f"{name}_te_split",
            f"{TE_UTILS}:SplitAlongDim.backward",
            "it splits, and returns gradients without a copy where they allow it",
            feature,
            uses=("if noop_ok:", "return (torch.cat(grad_outputs, dim=split_dim), None, None)"),
        ),
        read(
            f"{name}_llava",
            "megatron.core.models.multimodal.llava_model:LLaVAModel.__init__",
            "the tower is found as `vision_model`",
            feature,
            uses=("self.vision_model = RADIOViTModel(",),
        ),
        read(
            f"{name}_tower",
            f"{RADIO}:RADIOViTModel.forward",
            "the layers get hidden states with class tokens and positions in them",
            feature,
            uses=(_LAYERS,),
        ),
        read(
            f"{name}_tower_parts",
            f"{RADIO}:RADIOViTModel",
            "the layers, and the tokens of an image",
            feature,
            has="decoder seq_length",
        ),
        touched(
            "instance",
            f"{name}_layers",
            "megatron.core.transformer.transformer_block:TransformerBlock.forward",
            "all layers of a microbatch replay a graph of this function",
            feature,
            undo=FORWARD_OFF,
            takes="hidden_states attention_mask packed_seq_params",
        ),
    )


def _seams(feature: str) -> Seams:
    from ..seam import read

    return (
        read(
            "nemotron_vl_model",
            f"{_NEMOTRON_VL}.modeling_nemotron_vl:NemotronVLModel.__init__",
            "the model that holds the tower is found as `llava_model`",
            feature,
            uses=("self.llava_model = llava_model",),
        ),
        *radio_seams("nemotron_vl", feature),
    )


ENCODER = Declaration(
    name="Nemotron VL",
    model=Model(
        module=f"{_NEMOTRON_VL}.nemotron_vl_provider",
        provider="NemotronVLModelProvider",
        hub=(HubModels(r"nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL", encoder=(32, 1280)),),
        config_field="vision_model_type",
        steps=(),
    ),
    region="radio:RADIO",
    seams=_seams,
)
