"""Hugging Face's towers as Bridge's models build them, small, in fp32 on a CPU."""

from functools import partial

import torch
from transformers import PixtralVisionConfig, SiglipVisionConfig
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel
from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniVisionEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoderConfig,
    Qwen3OmniMoeVisionEncoderConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoder,
    Qwen3OmniMoeVisionEncoder,
)
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from tests.models.encoders import SMALL

from .towers import assert_close, loss_of

WINDOW_PATCH = 3 * 2 * 14 * 14
OMNI_PATCH = 3 * 2 * 16 * 16
SIDE, SIGLIP_PATCH = 28, 14
PIXTRAL_PATCH = 14
MEL = 16
TOLERANCE = 1e-6  # of outputs


def windowed(layers: int = 4, **changes) -> dict:
    """Return settings by which the second and last layer attend inside frames, the others inside windows."""
    settings = {**SMALL, "depth": layers, "fullatt_block_indexes": [1, layers - 1], "window_size": 112}
    return {**settings, **changes}


def qwen25_config(**changes) -> Qwen2_5_VLVisionConfig:
    """Return the configuration of a small tower with `windowed` layers."""
    return Qwen2_5_VLVisionConfig(**windowed(**changes))


def qwen25_omni_config(**changes) -> Qwen2_5OmniVisionEncoderConfig:
    """Return the configuration of a small tower with `windowed` layers."""
    return Qwen2_5OmniVisionEncoderConfig(**windowed(**changes))


def glm45v_config(**changes) -> Glm4vVisionConfig:
    """Return the configuration of a small tower with 4 x 4 position embeddings."""
    return Glm4vVisionConfig(**{**SMALL, "depth": 3, "image_size": 56, **changes})


def qwen3_omni_config(**changes) -> Qwen3OmniMoeVisionEncoderConfig:
    """Return the configuration of a small tower, two layers of which feed deepstack mergers."""
    settings = {"depth": 3, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1]}
    return Qwen3OmniMoeVisionEncoderConfig(**{**SMALL, **settings, **changes})


def qwen3_omni_audio_config(**changes) -> Qwen3OmniMoeAudioEncoderConfig:
    """Return the configuration of a small tower with chunks of 100 frames in windows of 4."""
    settings = {
        **{"d_model": 32, "encoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "output_dim": 24},
        **{"num_mel_bins": MEL, "downsample_hidden_size": 8, "n_window": 50, "n_window_infer": 400},
    }
    return Qwen3OmniMoeAudioEncoderConfig(**{**settings, "conv_chunksize": 3, **changes})


def pixtral_config(**changes) -> PixtralVisionConfig:
    """Return the configuration of a small tower for images of up to 18 x 18 patches."""
    settings = {
        **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "head_dim": 16},
        **{"intermediate_size": 48, "image_size": 18 * PIXTRAL_PATCH, "patch_size": PIXTRAL_PATCH},
    }
    return PixtralVisionConfig(**{**settings, **changes})


def _new(tower, config, seed: int, peaked=("qkv.weight",)):
    """Build a tower in training mode, with attention peaked as in a trained model."""
    torch.manual_seed(seed)
    model = tower._from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(peaked):
                parameter.normal_(std=0.3)
    return model.train()


def new_qwen25(seed: int = 0, **changes):
    """Build Qwen2.5-VL's tower."""
    return _new(Qwen2_5_VisionTransformerPretrainedModel, qwen25_config(**changes), seed)


def new_qwen25_omni(seed: int = 0, **changes):
    """Build Qwen2.5-Omni's tower."""
    peaked = ("attn.q.weight", "attn.k.weight")
    return _new(Qwen2_5OmniVisionEncoder, qwen25_omni_config(**changes), seed, peaked)


def new_glm45v(seed: int = 0, **changes):
    """Build GLM-4.5V's tower; its position embeddings are drawn large enough to be seen."""
    peaked = ("qkv.weight", "position_embedding.weight")
    return _new(Glm4vVisionModel, glm45v_config(**changes), seed, peaked)


def new_qwen3_omni(seed: int = 0, **changes):
    """Build Qwen3-Omni's tower; its position embeddings are drawn large enough to be seen."""
    peaked = ("qkv.weight", "pos_embed.weight")
    return _new(Qwen3OmniMoeVisionEncoder, qwen3_omni_config(**changes), seed, peaked)


def new_qwen3_omni_audio(seed: int = 0, **changes):
    """Build Qwen3-Omni's audio tower, drawn so that features and attention are seen in its outputs.

    Keys' biases, whose gradient is zero but for rounding, are not trained.
    """
    peaked = ("_proj.weight", "conv2d1.weight", "conv2d2.weight", "conv2d3.weight", "conv_out.weight")
    model = _new(Qwen3OmniMoeAudioEncoder, qwen3_omni_audio_config(**changes), seed, peaked)
    for layer in model.layers:
        layer.self_attn.k_proj.bias.requires_grad = False
    return model


def new_pixtral(seed: int = 0, **changes):
    """Build Ministral 3's tower."""
    return _new(PixtralVisionModel, pixtral_config(**changes), seed, ("q_proj.weight", "k_proj.weight"))


def new_siglip(seed: int = 0, head: bool = False, **changes):
    """Build the tower in training mode; images are of 2 x 2 patches. Bridge's model has no pooling head."""
    torch.manual_seed(seed)
    settings = {
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "image_size": SIDE,
        "patch_size": SIGLIP_PATCH,
        "vision_use_head": head,
    }
    return SiglipVisionModel._from_config(SiglipVisionConfig(**{**settings, **changes})).train()


def draw_windows(rows, seed: int = 0, width: int = WINDOW_PATCH):
    """Return random patches and the grid for them."""
    grid = torch.tensor(rows)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(grid.prod(1).sum()), width, generator=generator), grid


def draw_padded(rows, seed: int = 0):
    """Return random images for rows (1, height, width) in patches, padded to one size, and their sizes in pixels."""
    sizes = torch.tensor([[height, width] for _, height, width in rows]) * PIXTRAL_PATCH
    shape = len(rows), 3, *sizes.amax(0).tolist()
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)), sizes


def draw_clips(lengths, seed: int = 0):
    """Return random features of clips of so many frames, laid out as Bridge's model has them, and the lengths."""
    frames = torch.randn(sum(lengths), MEL, generator=torch.Generator().manual_seed(seed))
    return frames.T, torch.tensor(lengths)


def draw_images(count: int, seed: int = 0):
    """Return so many random images."""
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


# Called as Bridge's models call the towers; each returns what these use.


def merged(model, pixels, grid):
    """Return the embeddings of Qwen's and GLM-4.5V's towers."""
    return [model(pixels, grid_thw=grid, return_dict=True).pooler_output]


def with_features(model, pixels, grid):
    """Return embeddings and deepstack features of Qwen3-Omni's."""
    returned = model(pixels, grid_thw=grid)
    return [returned.pooler_output, *returned.deepstack_features]


def last_layer(model, pixels, sizes):
    """Return the last layer's hidden states of Ministral 3's."""
    return [model(pixels, image_sizes=sizes, output_hidden_states=True, return_dict=True).hidden_states[-1]]


def pooled(model, *images):
    """Return the hidden states of Gemma's, and with a head the pooled ones."""
    returned = model(*images, return_dict=True)
    return [t for t in (returned.last_hidden_state, returned.pooler_output) if t is not None]


def heard(model, features, lengths):
    """Return the embeddings of Qwen3-Omni's audio tower."""
    return [model(features, feature_lens=lengths).last_hidden_state]


def drawn(call, draw):
    """Return a function of a model, a size and a seed that calls the model with what is drawn."""
    return lambda model, size, seed=0: call(model, *draw(size, seed))


run_qwen25 = drawn(merged, draw_windows)
run_qwen3_omni = drawn(with_features, partial(draw_windows, width=OMNI_PATCH))
run_qwen3_omni_audio = drawn(heard, draw_clips)
run_pixtral = drawn(last_layer, draw_padded)
run_siglip = drawn(pooled, lambda count, seed: (draw_images(count, seed),))


def assert_equal_results(found, expected):
    """Compare outputs, and gradients less closely."""
    assert_close(found[0], expected[0], TOLERANCE)
    assert_close(found[1], expected[1], 10 * TOLERANCE)


def change_behind_the_hosts_back(graphs, change):
    """Have something done whenever the encoder's call was read, as another stream's work may."""
    read = graphs.workload.encoder.read

    def stale(*args, **kwargs):
        call = read(*args, **kwargs)
        change()
        return call

    graphs.workload.encoder.read = stale


def results(run, model, size, seed: int = 0):
    """Return outputs and the gradients of all trainable parameters."""
    outputs = run(model, size, seed)
    wanted = [p for p in model.parameters() if p.requires_grad]
    return [o.detach() for o in outputs], torch.autograd.grad(loss_of(outputs), wanted)
