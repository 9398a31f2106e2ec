"""The vision encoders that graphs know beside Qwen3-VL's, full size on a GPU, and batches for them.

Without a GPU the encoders are small: the same code runs, for tests.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bridge_cg_tools.benchmarks.measuring.measure import on_gpu
from bridge_cg_tools.benchmarks.models.reference import without_tf32
from bridge_cg_tools.benchmarks.models.workloads import CASES, Grid, one_image, tokens_of

# Query, key and value weights that make attention as peaked as in a trained model.
PEAKED_STD = 0.05


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch, with random gradients for the outputs.

    Attributes:
        arguments: What the encoder is called with, by name.
        gradients: Of every output.
        tokens: Patches.
        images: Images and videos.
    """

    arguments: dict[str, Any]
    gradients: list[Tensor]
    tokens: int
    images: int


@dataclass(frozen=True, slots=True)
class Encoder:
    """One encoder.

    Attributes:
        layers: Of the full size.
        build: Builds it with so many layers, bf16 on a GPU, fp32 on a CPU.
        make_batch: Makes a batch of a size (rows of grid_thw, or a number of images) from a seed.
        outputs: Takes the tensors out of what its forward returns.
        sizes: What the benchmark measures, by name.
        modes: The plugin's: "plugin" with kernels as eager's rounding asks for, "plugin_fast" where there are others.
        noise: Parameters whose gradient is zero but for rounding, by the end of their names.
    """

    layers: int
    build: Callable[[int], nn.Module]
    make_batch: Callable[[nn.Module, Any, int], Batch]
    outputs: Callable[[Any], list[Tensor]]
    sizes: dict[str, Any]
    modes: tuple[str, ...] = ("plugin", "plugin_fast")
    noise: tuple[str, ...] = ()

    def compared(self, model: nn.Module) -> list[bool]:
        """Return of each trainable parameter, in the model's order, whether its gradient says anything."""
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return [not name.endswith(self.noise) for name, _ in named] if self.noise else [True] * len(named)


def forward(encoder: Encoder, model: nn.Module, batch: Batch) -> list[Tensor]:
    """Return all outputs."""
    return encoder.outputs(model(**batch.arguments))


def step(encoder: Encoder, model: nn.Module, batch: Batch, between: Callable[[], object] | None = None) -> list[Tensor]:
    """Run forward and backward; returns the outputs. `between` is called when the forward was submitted."""
    outputs = forward(encoder, model, batch)
    if between is not None:
        between()
    torch.autograd.backward(outputs, batch.gradients)
    return [o.detach() for o in outputs]


def _device() -> torch.device:
    return torch.device("cuda" if on_gpu() else "cpu")


def _dtype() -> torch.dtype:
    return torch.bfloat16 if on_gpu() else torch.float32


def _peaked(model: nn.Module, names: Sequence[str]) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in names):
                parameter.normal_(std=PEAKED_STD)
    return model.to(_device(), _dtype()).train()


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator(_device()).manual_seed(seed)
    return torch.randn(shape, device=_device(), generator=generator).to(_dtype())


# Qwen3.5-VL: Bridge's own tower, as Qwen3-VL's without deepstack features.


def build_qwen35_vl(layers: int) -> nn.Module:
    """Build Bridge's tower without deepstack features."""
    from bridge_cg_tools.benchmarks.models.tower import build_tower

    return build_tower(layers=layers, deepstack=False)


def qwen35_vl_batch(model: nn.Module, rows: Grid, seed: int) -> Batch:
    """Make random patches; the grid is announced to the plugin as Bridge's batch step does."""
    from bridge_cg_tools.benchmarks.models.tower import make_batch

    made = make_batch(rows, model, seed)
    arguments = {"hidden_states": made.pixels, "grid_thw": made.grid}
    return Batch(arguments, made.gradients, made.tokens, len(rows))


# Qwen2.5-VL: Hugging Face's tower, most layers of which attend inside windows.


def build_qwen25_vl(layers: int) -> nn.Module:
    """Build the tower of Qwen2.5-VL-7B (32 layers, 676 M parameters)."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    torch.manual_seed(0)
    config = Qwen2_5_VLVisionConfig(**_windowed(layers))
    # As Bridge's model makes it, which takes PyTorch's scaled_dot_product_attention.
    return _peaked(Qwen2_5_VisionTransformerPretrainedModel._from_config(config), ("qkv.weight",))


def _windowed(layers: int) -> dict[str, Any]:
    """Return the sizes of Qwen2.5-VL-7B's tower."""
    full = [index for index in (7, 15, 23, 31) if index < layers] or [1, layers - 1]
    sizes = {"hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "out_hidden_size": 3584}
    if not on_gpu():
        sizes = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 24}
    return {"depth": layers, "fullatt_block_indexes": full, **sizes}


def patches_batch(model: nn.Module, rows: Grid, seed: int) -> Batch:
    """Make random patches; the grid is announced to the plugin as Bridge's batch step does."""
    from bridge_cg_plugin.upstream.hooks.vision_helper import GRIDS

    host, config = torch.tensor(rows), model.config
    tokens = tokens_of(rows)
    grid = host.to(_device(), copy=True)
    GRIDS.remember(grid, host)
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    arguments = {"hidden_states": _random((tokens, width), seed), "grid_thw": grid, "return_dict": True}
    shape = (tokens // config.spatial_merge_size**2, config.out_hidden_size)
    outputs = 1 + len(getattr(config, "deepstack_visual_indexes", ()))
    gradients = [_random(shape, seed + number) for number in range(1, 1 + outputs)]
    return Batch(arguments, gradients, tokens, len(rows))


# GLM-4.5V: Hugging Face's tower, whose position embeddings are sampled.


def build_glm45v(layers: int) -> nn.Module:
    """Build the tower of GLM-4.5V in the sizes that Bridge's provider has by default (24 layers)."""
    from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
    from transformers.models.glm4v.modeling_glm4v import Glm4vVisionModel

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 24, "image_size": 56}
    config = Glm4vVisionConfig(depth=layers, **({} if on_gpu() else small))
    return _peaked(Glm4vVisionModel._from_config(config), ("qkv.weight",))


# Qwen2.5-Omni: Hugging Face's tower, Qwen2.5-VL's with three projections in attention.


def build_qwen25_omni(layers: int) -> nn.Module:
    """Build the tower of Qwen2.5-Omni in the sizes of Qwen2.5-VL-7B's (32 layers)."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniVisionEncoderConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniVisionEncoder

    torch.manual_seed(0)
    config = Qwen2_5OmniVisionEncoderConfig(**_windowed(layers))
    return _peaked(Qwen2_5OmniVisionEncoder._from_config(config), ("attn.q.weight", "attn.k.weight"))


# Qwen3-Omni: Hugging Face's tower, which computes what Qwen3-VL's does.


def build_qwen3_omni(layers: int) -> nn.Module:
    """Build the tower of Qwen3-Omni in the sizes that Bridge's provider has by default (27 layers)."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeVisionEncoderConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder

    torch.manual_seed(0)
    indexes = [8, 16, 24] if layers >= 25 else [0, layers // 2]
    small = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 24}
    config = Qwen3OmniMoeVisionEncoderConfig(
        depth=layers, deepstack_visual_indexes=indexes, **({} if on_gpu() else small)
    )
    return _peaked(Qwen3OmniMoeVisionEncoder._from_config(config), ("qkv.weight",))


# Qwen3-Omni's audio: Hugging Face's tower, clips of any length in chunks and windows.


def build_qwen3_omni_audio(layers: int) -> nn.Module:
    """Build the audio tower of Qwen3-Omni (32 layers); 8 s attend to each other."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

    torch.manual_seed(0)
    sizes = {"d_model": 1280, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "output_dim": 2048}
    if not on_gpu():
        sizes = {"d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "output_dim": 24}
        sizes |= {"downsample_hidden_size": 8, "num_mel_bins": 16}
    config = Qwen3OmniMoeAudioEncoderConfig(encoder_layers=layers, n_window=50, n_window_infer=800, **sizes)
    return _peaked(Qwen3OmniMoeAudioEncoder._from_config(config), ("q_proj.weight", "k_proj.weight"))


def audio_batch(model: nn.Module, lengths: Sequence[int], seed: int) -> Batch:
    """Make random clips of so many frames; the lengths are announced to the plugin, which else reads them."""
    from bridge_cg_plugin.upstream.encoders.qwen3_omni_audio import chunking_of
    from bridge_cg_plugin.upstream.hooks.vision_helper import GRIDS

    chunking, host = chunking_of(model), torch.tensor(lengths)
    lens = host.to(_device(), copy=True)
    GRIDS.remember(lens, host)
    tokens = sum(map(chunking.clip_tokens, lengths))
    # Bridge's model cuts frames out of padded clips, and turns the result.
    features = _random((sum(lengths), model.config.num_mel_bins), seed).T
    gradient = _random((tokens, model.config.output_dim), seed + 1)
    room = sum(map(chunking.chunks, lengths)) * chunking.room
    return Batch({"input_features": features, "feature_lens": lens}, [gradient], room, len(lengths))


# Ministral 3: Hugging Face's Pixtral, images padded to one size.


def build_ministral3(layers: int) -> nn.Module:
    """Build the tower of Ministral 3 in the sizes of Mistral 3's default configuration (24 layers)."""
    from transformers import Mistral3Config
    from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel

    torch.manual_seed(0)
    config = Mistral3Config().vision_config
    config.num_hidden_layers = layers
    if not on_gpu():
        config.hidden_size, config.num_attention_heads, config.head_dim, config.intermediate_size = 32, 2, 16, 48
    return _peaked(PixtralVisionModel._from_config(config), ("q_proj.weight", "k_proj.weight"))


def padded_batch(model: nn.Module, rows: Grid, seed: int) -> Batch:
    """Make random images padded to one size; their sizes are announced to the plugin as Bridge's batch step does."""
    from bridge_cg_plugin.upstream.hooks.vision_helper import GRIDS

    config, tokens = model.config, tokens_of(rows)
    host = torch.tensor([row[1:] for row in rows]) * config.patch_size
    sizes = host.to(_device(), copy=True)
    GRIDS.remember(sizes, host)
    pixels = _random((len(rows), config.num_channels, *host.amax(0).tolist()), seed)
    arguments = {"pixel_values": pixels, "image_sizes": sizes, "output_hidden_states": True, "return_dict": True}
    return Batch(arguments, [_random((1, tokens, config.hidden_size), seed + 1)], tokens, len(rows))


# Gemma 3: Hugging Face's SigLIP, images of one size.


def build_siglip(layers: int) -> nn.Module:
    """Build the tower of Gemma 3 (27 layers, 417 M parameters), without a pooling head as in Bridge's model."""
    from transformers import SiglipVisionConfig
    from transformers.models.siglip.modeling_siglip import SiglipVisionModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 1152, "num_attention_heads": 16, "intermediate_size": 4304, "image_size": 896}
    if not on_gpu():
        sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "image_size": 56}
    config = SiglipVisionConfig(num_hidden_layers=layers, patch_size=14, vision_use_head=False, **sizes)
    return _peaked(SiglipVisionModel._from_config(config), ("q_proj.weight", "k_proj.weight"))


def siglip_batch(model: nn.Module, images: int, seed: int) -> Batch:
    """Make so many random images."""
    config = model.config
    patches = (config.image_size // config.patch_size) ** 2
    pixels = _random((images, config.num_channels, config.image_size, config.image_size), seed)
    gradient = _random((images, patches, config.hidden_size), seed + 1)
    return Batch({"pixel_values": pixels, "return_dict": True}, [gradient], images * patches, images)


class Fp32Copy:
    """A copy of one of Hugging Face's towers in fp32: what every mode is measured against.

    Args:
        encoder: The encoder.
        model: The tower, without graphs on it.
    """

    def __init__(self, encoder: Encoder, model: nn.Module) -> None:
        self._encoder, self._model = encoder, copy.deepcopy(model).float()

    def step(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Return outputs and parameters' gradients; pixels and the outputs' gradients are cast up."""
        arguments = {
            name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in batch.arguments.items()
        }
        with without_tf32():
            outputs = self._encoder.outputs(self._model(**arguments))
            gradients = torch.autograd.grad(outputs, [*self._model.parameters()], [g.float() for g in batch.gradients])
        return [o.detach() for o in outputs], list(gradients)


# One image of 784, 2304 and 8192 patches, and a mix of 6720.
IMAGES = {**{name: CASES[name] for name in ("1x448", "1x768", "8mix")}, "1x8192": one_image(8192)}
ENCODERS = {
    "qwen35_vl": Encoder(
        27,
        build_qwen35_vl,
        qwen35_vl_batch,
        lambda returned: [returned[0], *returned[1]],
        {name: CASES[name] for name in ("1x448", "8mix")},
    ),
    "qwen25_vl": Encoder(
        32,
        build_qwen25_vl,
        patches_batch,
        lambda returned: [returned.pooler_output],
        {name: CASES[name] for name in ("1x448", "1x768", "8mix", "video16")},
    ),
    "glm45v": Encoder(24, build_glm45v, patches_batch, lambda returned: [returned.pooler_output], IMAGES),
    "qwen25_omni": Encoder(
        32,
        build_qwen25_omni,
        patches_batch,
        lambda returned: [returned.pooler_output],
        IMAGES,
        noise=("attn.k.bias",),  # softmax does not change with it
    ),
    "qwen3_omni": Encoder(
        27,
        build_qwen3_omni,
        patches_batch,
        lambda returned: [returned.pooler_output, *returned.deepstack_features],
        IMAGES,
    ),
    "qwen3_omni_audio": Encoder(
        32,
        build_qwen3_omni_audio,
        audio_batch,
        lambda returned: [returned.last_hidden_state],
        {"8_s": [800], "30_s": [3000], "8_clips": [1230, 310, 2750, 480, 990, 150, 1800, 620]},
        modes=("plugin",),
        noise=("k_proj.bias",),  # softmax does not change with it
    ),
    "ministral3": Encoder(24, build_ministral3, padded_batch, lambda returned: [returned.hidden_states[-1]], IMAGES),
    "siglip": Encoder(
        27,
        build_siglip,
        siglip_batch,
        lambda returned: [returned.last_hidden_state],
        {"1_image": 1, "2_images": 2, "4_images": 4},
        modes=("plugin",),
        noise=("k_proj.bias",),  # softmax does not change with it
    ),
}
