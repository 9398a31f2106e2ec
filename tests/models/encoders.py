"""The encoders that graphs know, full size on a GPU."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bridge_cg_plugin.graphs.buckets import GRANULARITY, round_up
from scripts.performance.measure import on_gpu
from tests.models import tower
from tests.models.encoder_case import (
    IMAGES,
    PEAKED_STD,
    RMSNORM_STD,
    Batch,
    Encoder,
    Fp32Copy,
    device,
    patches_batch,
    peaked,
    random,
)
from tests.models.mixes import ClipMixes, CountMixes, ImageMixes
from tests.models.radio_tower import PATCH, build_radio, fp32_radio, segments_of
from tests.models.reference import Fp32Tower
from tests.models.tower import build_tower
from tests.models.workloads import CASES, Grid, tokens_of

# Of towers without a GPU.
SMALL: dict[str, Any] = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 24}


def new(tower: Any, config: Any, names: Sequence[str], std: float = PEAKED_STD) -> nn.Module:
    """Build a tower of Hugging Face's, with parameters of these names peaked."""
    torch.manual_seed(0)
    return peaked(tower._from_config(config), names, std)


# Qwen3.5-VL: Bridge's own tower, as Qwen3-VL's without deepstack features.


def bridge_batch(model: nn.Module, rows: Grid, seed: int) -> Batch:
    """Make random patches; the grid is announced to the plugin as Bridge's batch step does."""
    made = tower.make_batch(rows, model, seed)
    arguments = {"hidden_states": made.pixels, "grid_thw": made.grid}
    return Batch(arguments, made.gradients, made.tokens, len(rows))


class Fp32Bridge:
    """See `Reference`."""

    def __init__(self, encoder: Encoder, model: nn.Module) -> None:
        self._tower = Fp32Tower(model)

    def step(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """See `Reference`."""
        pixels, grid = batch.arguments["hidden_states"], batch.arguments["grid_thw"]
        return self._tower.step(tower.Batch(pixels, grid, batch.gradients, [tuple(row) for row in grid.tolist()]))


QWEN35_VL = Encoder(
    27,
    lambda layers: tower.build_tower(layers=layers, deepstack=False),
    bridge_batch,
    lambda returned: [returned[0], *returned[1]],
    {name: CASES[name] for name in ("1x448", "8mix")},
    reference=Fp32Bridge,
)


# Qwen3-VL: Bridge's own tower with deepstack features.

QWEN3_VL = Encoder(
    27,
    lambda layers: build_tower(layers=layers),
    bridge_batch,
    lambda returned: [returned[0], *returned[1]],
    CASES,
    reference=Fp32Bridge,
)


# Qwen2.5-VL: Hugging Face's tower, most layers of which attend inside windows.


def build_qwen25_vl(layers: int) -> nn.Module:
    """Build the tower of Qwen2.5-VL-7B (32 layers, 676 M parameters)."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    config = Qwen2_5_VLVisionConfig(**windowed(layers))
    # As Bridge's model makes it, which takes PyTorch's scaled_dot_product_attention.
    return new(Qwen2_5_VisionTransformerPretrainedModel, config, ("qkv.weight",), RMSNORM_STD)


def windowed(layers: int) -> dict[str, Any]:
    """Return the sizes of Qwen2.5-VL-7B's tower."""
    full = [index for index in (7, 15, 23, 31) if index < layers] or [1, layers - 1]
    sizes = {"hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 3584}
    return {"depth": layers, "fullatt_block_indexes": full, **(sizes if on_gpu() else SMALL)}


QWEN25_VL = Encoder(
    32,
    build_qwen25_vl,
    patches_batch,
    lambda returned: [returned.pooler_output],
    {name: CASES[name] for name in ("1x448", "1x768", "8mix", "video16")},
)


# Qwen2.5-Omni: Hugging Face's tower, Qwen2.5-VL's with three projections in attention.


def build_qwen25_omni(layers: int) -> nn.Module:
    """Build the tower of Qwen2.5-Omni in the sizes of Qwen2.5-VL-7B's (32 layers)."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniVisionEncoderConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder

    config = Qwen2_5OmniVisionEncoderConfig(**windowed(layers))
    return new(Qwen2_5OmniVisionEncoder, config, ("attn.q.weight", "attn.k.weight"), RMSNORM_STD)


QWEN25_OMNI = Encoder(
    32,
    build_qwen25_omni,
    patches_batch,
    lambda returned: [returned.pooler_output],
    IMAGES,
    noise=("attn.k.bias",),  # softmax does not change with it
)


# Qwen3-Omni: Hugging Face's tower, which computes what Qwen3-VL's does.


def build_qwen3_omni(layers: int) -> nn.Module:
    """Build the tower of Qwen3-Omni-30B (27 layers), whose language model has a width of 2048."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeVisionEncoderConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder

    indexes = [8, 16, 24] if layers >= 25 else [0, layers // 2]
    sizes: dict[str, Any] = {"out_hidden_size": 2048} if on_gpu() else SMALL
    config = Qwen3OmniMoeVisionEncoderConfig(depth=layers, deepstack_visual_indexes=indexes, **sizes)
    return new(Qwen3OmniMoeVisionEncoder, config, ("qkv.weight",))


QWEN3_OMNI = Encoder(
    27, build_qwen3_omni, patches_batch, lambda returned: [returned.pooler_output, *returned.deepstack_features], IMAGES
)


# Qwen3-Omni's audio: Hugging Face's tower, clips of any length in chunks and windows.


def build_qwen3_omni_audio(layers: int) -> nn.Module:
    """Build the audio tower of Qwen3-Omni (32 layers); 8 s attend to each other."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

    sizes: dict[str, Any] = {
        "d_model": 1280,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "output_dim": 2048,
    }
    if not on_gpu():
        sizes = {"d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "output_dim": 24}
        sizes |= {"downsample_hidden_size": 8, "num_mel_bins": 16}
    config = Qwen3OmniMoeAudioEncoderConfig(encoder_layers=layers, n_window=50, n_window_infer=800, **sizes)
    return new(Qwen3OmniMoeAudioEncoder, config, ("q_proj.weight", "k_proj.weight"))


def audio_batch(model: nn.Module, lengths: Sequence[int], seed: int) -> Batch:
    """Make random clips of so many frames; the lengths are announced to the plugin, which else reads them."""
    from bridge_cg_plugin.upstream.encoders.qwen3_omni import ROOM, chunks_of, tokens_of
    from bridge_cg_plugin.upstream.hooks.batches import GRIDS

    config: Any = model.config
    host = torch.tensor(lengths)
    lens = host.to(device(), copy=True)
    GRIDS.remember(lens, host)
    tokens = sum(map(tokens_of, lengths))
    # Bridge's model cuts frames out of padded clips, and turns the result.
    features = random((sum(lengths), config.num_mel_bins), seed).T
    gradient = random((tokens, config.output_dim), seed + 1)
    room = sum(map(chunks_of, lengths)) * ROOM
    return Batch({"input_features": features, "feature_lens": lens}, [gradient], room, len(lengths))


def room_of_chunk(model: nn.Module) -> int:
    """Return what a chunk counts."""
    from bridge_cg_plugin.upstream.encoders.qwen3_omni import ROOM

    return ROOM


QWEN3_OMNI_AUDIO = Encoder(
    32,
    build_qwen3_omni_audio,
    audio_batch,
    lambda returned: [returned.last_hidden_state],
    {
        "8_s": [800],
        "30_s": [3000],
        "8_clips": [1230, 310, 2750, 480, 990, 150, 1800, 620],
        "5_clips": [3000] * 4 + [2400],  # 2304 tokens, as buckets count them
        "18_clips": [3000] * 17 + [200],  # 8192
    },
    modes=("plugin",),
    noise=("k_proj.bias",),  # softmax does not change with it
    mixes=ClipMixes(100, room_of_chunk),
)


# GLM-4.5V: Hugging Face's tower, whose position embeddings are sampled.


def build_glm45v(layers: int) -> nn.Module:
    """Build the tower of GLM-4.5V (24 layers); transformers' default is the wider merger of GLM-4.1V."""
    from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
    from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel

    sizes: dict[str, Any] = {"intermediate_size": 10944} if on_gpu() else {**SMALL, "image_size": 56}
    config = Glm4vVisionConfig(depth=layers, **sizes)
    return new(Glm4vVisionModel, config, ("qkv.weight",), RMSNORM_STD)


GLM45V = Encoder(24, build_glm45v, patches_batch, lambda returned: [returned.pooler_output], IMAGES)


# Gemma 3: Hugging Face's SigLIP, images of one size.


def build_siglip(layers: int) -> nn.Module:
    """Build the tower of Gemma 3 (27 layers, 417 M parameters), without a pooling head as in Bridge's model."""
    from transformers import SiglipVisionConfig
    from transformers.models.siglip.modeling_siglip import SiglipVisionModel

    sizes: dict[str, Any] = {
        "hidden_size": 1152,
        "num_attention_heads": 16,
        "intermediate_size": 4304,
        "image_size": 896,
    }
    if not on_gpu():
        sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 56}
    sizes["vision_use_head"] = False  # the model asks for it; configurations take any field
    config = SiglipVisionConfig(num_hidden_layers=layers, patch_size=14, **sizes)
    return new(SiglipVisionModel, config, ("q_proj.weight", "k_proj.weight"))


def patches_of(model: nn.Module) -> int:
    """Return the patches of an image."""
    config: Any = model.config
    sides: int = config.image_size // config.patch_size
    return sides**2


def siglip_batch(model: nn.Module, images: int, seed: int) -> Batch:
    """Make so many random images."""
    config: Any = model.config
    patches = patches_of(model)
    pixels = random((images, config.num_channels, config.image_size, config.image_size), seed)
    gradient = random((images, patches, config.hidden_size), seed + 1)
    return Batch({"pixel_values": pixels, "return_dict": True}, [gradient], images * patches, images)


SIGLIP = Encoder(
    27,
    build_siglip,
    siglip_batch,
    lambda returned: [returned.last_hidden_state],
    {"1_image": 1, "2_images": 2, "4_images": 4},
    modes=("plugin",),
    noise=("k_proj.bias",),  # softmax does not change with it
    mixes=CountMixes(patches_of),
)


# Ministral 3: Hugging Face's Pixtral, images padded to one size.


def build_ministral3(layers: int) -> nn.Module:
    """Build the tower of Ministral 3 in the sizes of Mistral 3's default configuration (24 layers)."""
    from transformers import Mistral3Config
    from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel

    config: Any = Mistral3Config().vision_config
    config.num_hidden_layers = layers
    if not on_gpu():
        config.hidden_size, config.num_attention_heads, config.head_dim, config.intermediate_size = 32, 2, 16, 48
    return new(PixtralVisionModel, config, ("q_proj.weight", "k_proj.weight"))


def padded_batch(model: nn.Module, rows: Grid, seed: int) -> Batch:
    """Make random images padded to one size; their sizes are announced to the plugin as Bridge's batch step does."""
    from bridge_cg_plugin.upstream.hooks.batches import GRIDS

    config: Any = model.config
    tokens = tokens_of(rows)
    host = torch.tensor([row[1:] for row in rows]) * config.patch_size
    sizes = host.to(device(), copy=True)
    GRIDS.remember(sizes, host)
    pixels = random((len(rows), config.num_channels, *host.amax(0).tolist()), seed)
    arguments = {"pixel_values": pixels, "image_sizes": sizes, "output_hidden_states": True, "return_dict": True}
    return Batch(arguments, [random((1, tokens, config.hidden_size), seed + 1)], tokens, len(rows))


MINISTRAL3 = Encoder(24, build_ministral3, padded_batch, lambda returned: [returned.hidden_states[-1]], IMAGES)


# Nemotron VL: megatron-core's RADIO on tiles of 512 x 512 pixels. Positions are not drawn, to compare runs.

TILE_SETTINGS = {"has_cpe": True, "force_cpe_eval_mode": True}


def build_nemotron_vl(layers: int) -> nn.Module:
    """Build the tower of Nemotron Nano 12B v2 VL (32 layers)."""
    model: nn.Module = build_radio(layers=layers, **TILE_SETTINGS)
    return model


def room_of_tile(model: nn.Module) -> int:
    """Return what a tile counts: its tokens, class tokens among them, rounded up."""
    tokens: Any = model.seq_length
    return round_up(tokens, GRANULARITY)


def tiles_batch(model: nn.Module, tiles: int, seed: int) -> Batch:
    """Make so many random tiles."""
    radio: Any = model
    pixels = random((tiles, 3, radio.img_h, radio.img_w), seed)
    gradient = random((tiles, radio.seq_length, radio.visual_hidden_size), seed + 1)
    return Batch({"x": pixels}, [gradient], tiles * room_of_tile(model), tiles)


NEMOTRON_VL = Encoder(
    32,
    build_nemotron_vl,
    tiles_batch,
    lambda returned: [returned],
    {"1_tile": 1, "2_tiles": 2, "7_tiles": 7, "8_tiles": 8},
    mixes=CountMixes(room_of_tile),
    reference=lambda encoder, model: Fp32Copy(encoder, *fp32_radio(model, **TILE_SETTINGS)),
)


# Nemotron Omni: megatron-core's RADIO on images of any size, which stays in evaluation mode.

CLASS_TOKENS = 10
OMNI_SETTINGS = {"force_eval_mode": True, "force_cpe_eval_mode": True, "class_token_len": CLASS_TOKENS}


class PackedTower(nn.Module):
    """Holds the tower, whose forward changes the segments that it gets."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.vision_model, self.config = tower, tower.config

    def forward(self, x: Tensor, sizes: Tensor, segments: Any) -> Tensor:
        """Call the tower with segments of its own."""
        found: Tensor = self.vision_model(x, imgs_sizes=sizes, packed_seq_params=copy.copy(segments))
        return found


def build_nemotron_omni(layers: int) -> nn.Module:
    """Build the tower of Nemotron 3 Nano Omni (32 layers), as Bridge's conversion of its configuration sets it up."""
    return PackedTower(build_radio(layers=layers, packed=True, **OMNI_SETTINGS))


def fp32_omni(encoder: Encoder, model: Any) -> Fp32Copy:
    """Return the tower in fp32."""
    tower, parameters = fp32_radio(model.vision_model, packed=True, **OMNI_SETTINGS)
    return Fp32Copy(encoder, PackedTower(tower), parameters)


def omni_batch(model: Any, rows: Grid, seed: int) -> Batch:
    """Make random images of so many patches; the layers see class tokens of each, too."""
    sizes, tower = [(height * PATCH, width * PATCH) for _, height, width in rows], model.vision_model
    tokens = tokens_of(rows) + len(rows) * tower.class_token_len
    arguments = {
        "x": random((1, tokens_of(rows), 3 * PATCH**2), seed),
        "sizes": torch.tensor(sizes),
        "segments": segments_of(sizes, device()),
    }
    return Batch(arguments, [random((1, tokens, tower.visual_hidden_size), seed + 1)], tokens, len(rows))


NEMOTRON_OMNI = Encoder(
    32,
    build_nemotron_omni,
    omni_batch,
    lambda returned: [returned],
    IMAGES,
    mixes=ImageMixes(CLASS_TOKENS),
    reference=fp32_omni,
)


ENCODERS = {
    "glm45v": GLM45V,
    "ministral3": MINISTRAL3,
    "nemotron_omni": NEMOTRON_OMNI,
    "nemotron_vl": NEMOTRON_VL,
    "qwen25_omni": QWEN25_OMNI,
    "qwen25_vl": QWEN25_VL,
    "qwen35_vl": QWEN35_VL,
    "qwen3_omni": QWEN3_OMNI,
    "qwen3_omni_audio": QWEN3_OMNI_AUDIO,
    "qwen3_vl": QWEN3_VL,
    "siglip": SIGLIP,
}
