"""Ministral 3's vision tower, Pixtral."""

from . import MODELS, Declaration, HubModels, Model, Seams

_MINISTRAL3, _TOWER = f"{MODELS}.ministral3", "transformers.models.pixtral.modeling_pixtral"


def _seams(feature: str) -> Seams:
    return *_model(feature), *_tower(feature), *_layers(feature)


def _model(feature: str) -> Seams:
    from ..seam import read

    return (
        read(
            "ministral3_model",
            f"{_MINISTRAL3}.modeling_ministral3:Ministral3Model.__init__",
            "the tower is found as `vision_tower`",
            feature,
            uses=("self.vision_tower =", "self.get_image_features ="),
        ),
        read(
            "ministral3_features",
            "transformers.models.mistral3.modeling_mistral3:Mistral3Model.get_image_features",
            "the tower is asked for all hidden states, of which the last are read",
            feature,
            uses=(
                "image_sizes=image_sizes",
                "output_hidden_states=True",
                "image_outputs.hidden_states[vision_feature_layer]",
            ),
        ),
    )


def _tower(feature: str) -> Seams:
    from ..seam import read
    from ..tower_seams import region_seams

    return (
        *region_seams(
            "pixtral",
            _TOWER,
            "PixtralVisionModel",
            feature,
            ("pixel_values", "image_sizes"),
            ("patch_conv", "ln_pre", "transformer", "patch_positional_embedding"),
            (
                *("self.patch_conv(", "size[0] // self.patch_size", "self.ln_pre(", "position_ids_in_meshgrid("),
                *("self.patch_positional_embedding(patch_embeds, position_ids)", "self.transformer("),
                *("attention_mask=attention_mask", "position_embeddings=position_embeddings"),
            ),
        ),
        read(
            "pixtral_places",
            f"{_TOWER}:position_ids_in_meshgrid",
            "a patch's place in the table of frequencies follows from its row and column",
            feature,
            takes="patch_embeds_list max_width",
            uses=("h_grid * max_width + v_grid",),
        ),
    )


def _layers(feature: str) -> Seams:
    from ..seam import called, read, touched

    return (
        called(
            "pixtral_layer",
            f"{_TOWER}:PixtralAttentionLayer.forward",
            "the layers, which hand `attention_mask` on to attention as they get it",
            feature,
            takes="hidden_states attention_mask position_embeddings",
            uses=("attention_mask=attention_mask", "position_embeddings=position_embeddings"),
        ),
        touched(
            "instance",
            "pixtral_attention",
            f"{_TOWER}:PixtralAttention.forward",
            "attention takes segments as a tensor while work is recorded; upstream makes a mask on the host",
            feature,
            undo="put back when the recording ends",
            takes="hidden_states attention_mask position_embeddings",
            uses=(
                *("self.q_proj(", "self.k_proj(", "self.v_proj(", "apply_rotary_pos_emb(", "scaling=self.scaling"),
                "self.o_proj(",
            ),
        ),
        read(
            "hidden_state_hooks",
            "transformers.utils.output_capturing:install_output_capuring_hook",
            "the hooks that it leaves on layers collect outputs only in calls that ask for them",
            feature,
            formerly=("install_output_capturing_hook",),
            uses=("_active_collector.get()", "module.register_forward_hook(output_capturing_hook)"),
        ),
    )


ENCODER = Declaration(
    name="Ministral 3",
    model=Model(
        module=f"{_MINISTRAL3}.ministral3_provider",
        provider="Ministral3ModelProvider",
        hub=(HubModels(r"mistralai/Ministral-3-\d+B"),),
        config_field="hf_config",
    ),
    region="pixtral:PIXTRAL",
    seams=_seams,
)
