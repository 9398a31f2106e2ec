"""Nemotron VL's vision encoder: megatron-core's RADIO on tiles of one size."""

from . import MODELS, Declaration, HubModels, Model, Seams

_NEMOTRON_VL, RADIO = f"{MODELS}.nemotron_vl", "megatron.core.models.vision.radio"
_LAYERS = "self.decoder(x, attention_mask=attention_mask, packed_seq_params=packed_seq_params)"


def radio_seams(name: str, feature: str) -> Seams:
    """Return the seams of RADIO, for a model of this name."""
    from ..registry.engine import CORE_ATTENTION, RECORDED, TE_UTILS, attention_backward, cudnn_version
    from ..seam import Seam
    from ..tower_seams import FORWARD_OFF

    return (
        cudnn_version(f"{name}_cudnn_version", feature),
        attention_backward(f"{name}_attention_backward", feature),
        Seam(
            name=f"{name}_split",
            module=CORE_ATTENTION,
            target="SplitAlongDim",
            kind="value",
            touch="replaced",
            purpose="gradients that attention wrote side by side are not copied",
            features=(feature,),
            undo=RECORDED,
        ),
        Seam(
            name=f"{name}_te_split",
            module=TE_UTILS,
            target="SplitAlongDim.backward",
            kind="function",
            touch="called",
            purpose="it splits, and returns gradients without a copy where they allow it",
            features=(feature,),
            uses=("if noop_ok:", "return (torch.cat(grad_outputs, dim=split_dim), None, None)"),
        ),
        Seam(
            name=f"{name}_llava",
            module="megatron.core.models.multimodal.llava_model",
            target="LLaVAModel.__init__",
            kind="function",
            touch="read",
            purpose="the tower is found as `vision_model`",
            features=(feature,),
            uses=("self.vision_model = RADIOViTModel(",),
        ),
        Seam(
            name=f"{name}_tower",
            module=RADIO,
            target="RADIOViTModel.forward",
            kind="function",
            touch="read",
            purpose="the layers get hidden states with class tokens and positions in them",
            features=(feature,),
            uses=(_LAYERS,),
        ),
        Seam(
            name=f"{name}_tower_parts",
            module=RADIO,
            target="RADIOViTModel",
            kind="class",
            touch="read",
            purpose="the layers, and the tokens of an image",
            features=(feature,),
            attributes=("decoder", "seq_length"),
        ),
        Seam(
            name=f"{name}_layers",
            module="megatron.core.transformer.transformer_block",
            target="TransformerBlock.forward",
            kind="function",
            touch="instance",
            purpose="all layers of a microbatch replay a graph of this function",
            features=(feature,),
            undo=FORWARD_OFF,
            parameters=("hidden_states", "attention_mask", "packed_seq_params"),
        ),
    )


def _seams(feature: str) -> Seams:
    from ..seam import Seam

    return (
        Seam(
            name="nemotron_vl_model",
            module=f"{_NEMOTRON_VL}.modeling_nemotron_vl",
            target="NemotronVLModel.__init__",
            kind="function",
            touch="read",
            purpose="the model that holds the tower is found as `llava_model`",
            features=(feature,),
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
