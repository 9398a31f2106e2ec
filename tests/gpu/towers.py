"""The models of `tests.gpu.tower_training`: small language models around encoders of full width."""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from megatron.bridge.models.gemma_vl.gemma3_vl_provider import Gemma3VLModelProvider
from megatron.bridge.models.gemma_vl.modeling_gemma3_vl import Gemma3VLMultimodalProjectorConfig
from megatron.bridge.models.glm_vl.glm_45v_provider import GLM45VModelProvider
from megatron.bridge.models.nemotron_omni.nemotron_omni_provider import NemotronOmniModelProvider
from megatron.bridge.models.nemotron_vl.nemotron_vl_provider import NemotronVLModelProvider
from megatron.bridge.models.qwen_omni import qwen3_omni_step
from megatron.bridge.models.qwen_omni.qwen3_omni_provider import Qwen3OmniModelProvider
from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider
from megatron.bridge.training import llava_step, nemotron_omni_step, vlm_step
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from megatron.core.models.multimodal import llava_model
from megatron.core.models.vision.radio import RADIOViTModel
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from transformers import SiglipVisionConfig
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeThinkerConfig

from tests.models.language_model import DENSE

# Layers of a tower, and of the language model with its width.
LAYERS, LANGUAGE_LAYERS, WIDTH, HEADS = 4, 2, 1024, 8
VOCABULARY, IMAGE, START, END = 4096, 4000, 4001, 4002
SEQUENCE = 1024
# (height, width) in patches, 2 x 2 of which are an embedding.
SIZES = ((28, 28), (20, 34), (32, 32))
# Patches of one image, and of two.
PATCH_BUCKETS = (1024, 1536, 2048)

# Values of a patch of 14 x 14 pixels, of two frames.
WINDOW_PATCH = 3 * 2 * 14 * 14

type Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tower:
    """How one model trains on random images, or on images and sounds.

    Attributes:
        provider: Returns Bridge's provider of the model, its tower of full width.
        buckets: Of the vision encoder, as `vision_cuda_graph_buckets` has them.
        draw: Draws the items of a sample, each of which a caption follows.
        placeholders: Returns the tokens that stand for an item.
        inputs: Returns what a batch has besides tokens, from its items, its tokens `[1, length]` and a generator.
        length: Most tokens of a sample.
        unit: What a sample's tokens are padded to a multiple of, as Bridge's collate functions do.
        forward_step: Bridge's.
        encoders: That are called in every microbatch and have graphs.
        changed: Entered before the model is built.
        eager_runs: How often it is trained eager; the largest difference of two of these is eager's noise.
    """

    provider: Callable[[], Any]
    buckets: Sequence[int]
    draw: Callable[[random.Random], list[Any]]
    placeholders: Callable[[Any], list[int]]
    inputs: Callable[[list[Any], Tensor, torch.Generator], Inputs]
    length: int = SEQUENCE
    unit: int = 128
    forward_step: Callable[..., Any] = vlm_step.forward_step
    encoders: int = 1
    changed: Callable[[], AbstractContextManager[Any]] = nullcontext
    eager_runs: int = 2


def one_or_two(sizes: Sequence[Any]) -> Callable[[random.Random], list[Any]]:
    """Return a function that draws one or two items of these."""
    return lambda rng: [rng.choice(sizes) for _ in range(rng.randint(1, 2))]


def image_tokens(size: tuple[int, int]) -> list[int]:
    """Return the tokens of an image of (height, width) in patches."""
    height, width = size
    return [START, *[IMAGE] * (height * width // 4), END]


def patch_inputs(values: int) -> Callable[[list[tuple[int, int]], Tensor, torch.Generator], Inputs]:
    """Return a function that draws images as patches in one sequence.

    Args:
        values: Of a patch, with those of the second frame that a still image repeats.
    """

    def draw(images: list[tuple[int, int]], tokens: Tensor, generator: torch.Generator) -> Inputs:
        grid = torch.tensor([(1, *size) for size in images])
        pixels = torch.randn(int(grid.prod(1).sum()), values, generator=generator)
        return {"visual_inputs": GenericVisualInputs(pixel_values=pixels, image_grid_thw=grid)}

    return draw


def language_model(**changes: Any) -> dict[str, Any]:
    """Return fields of a provider: a small language model that trains in bf16."""
    settings = {
        "num_layers": LANGUAGE_LAYERS,
        "hidden_size": WIDTH,
        "ffn_hidden_size": 3 * WIDTH,
        "num_attention_heads": HEADS,
        "num_query_groups": 4,
        "kv_channels": WIDTH // HEADS,
        "vocab_size": VOCABULARY,
        "seq_length": SEQUENCE,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "make_vocab_size_divisible_by": 128,
        "gradient_accumulation_fusion": False,
        "use_te_rng_tracker": True,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
    }
    return {**settings, **changes}


# Fields of a provider of a model with experts: a few, of which each token sees two.
FEW_EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": WIDTH}
# A token that another expert takes changes all that follows: gradient norms of eight runs of one model differed in
# pairs by 0.2 to 4 %, so one pair says little.
EAGER_RUNS_WITH_EXPERTS = 4


def qwen25_vl() -> Qwen25VLModelProvider:
    """Qwen2.5-VL: Hugging Face's tower, most layers of which attend inside windows."""
    return Qwen25VLModelProvider(
        **language_model(**DENSE),
        image_token_id=IMAGE,
        vision_start_token_id=START,
        add_qkv_bias=True,
        vision_config=Qwen2_5_VLVisionConfig(
            depth=6,
            hidden_size=1280,
            num_heads=16,
            intermediate_size=3420,
            out_hidden_size=WIDTH,
            fullatt_block_indexes=[2, 5],
        ),
    )


QWEN25_VL = Tower(qwen25_vl, PATCH_BUCKETS, one_or_two(SIZES), image_tokens, patch_inputs(WINDOW_PATCH))


def glm45v() -> GLM45VModelProvider:
    """GLM-4.5V: Hugging Face's tower; a language model with experts behind its first layer."""
    return GLM45VModelProvider(
        **language_model(),
        **FEW_EXPERTS,
        moe_layer_freq=[0, 1],
        moe_shared_expert_intermediate_size=WIDTH,
        moe_shared_expert_overlap=False,
        mtp_num_layers=None,
        image_token_id=IMAGE,
        image_start_token_id=START,
        image_end_token_id=END,
        vision_config=Glm4vVisionConfig(depth=LAYERS, out_hidden_size=WIDTH, intermediate_size=10944),
    )


def patches_and_kinds(images: list[tuple[int, int]], tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Draw images; the model takes positions from which tokens are theirs."""
    inputs = patch_inputs(WINDOW_PATCH)(images, tokens, generator)
    inputs["visual_inputs"].mm_token_type_ids = (tokens == IMAGE).long()
    return inputs


GLM45V = Tower(
    glm45v, PATCH_BUCKETS, one_or_two(SIZES), image_tokens, patches_and_kinds, eager_runs=EAGER_RUNS_WITH_EXPERTS
)


QWEN3_PATCH, MEL = 3 * 2 * 16 * 16, 128
SOUND, SOUND_START, SOUND_END = 4003, 4004, 4005
# Frames of a sound: chunks have 100, windows 800.
LENGTHS = (300, 520, 800, 1040)

type Item = tuple[int, int] | int


def qwen3_omni() -> Qwen3OmniModelProvider:
    """Qwen3-Omni, its vision and its audio: Hugging Face's towers; a language model with experts."""
    vision = {"depth": LAYERS, "deepstack_visual_indexes": [0, LAYERS // 2], "out_hidden_size": WIDTH}
    audio = {"encoder_layers": LAYERS, "n_window": 50, "n_window_infer": 800, "output_dim": WIDTH}
    sizes = {"d_model": 1280, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
    return Qwen3OmniModelProvider(
        **language_model(),
        **FEW_EXPERTS,
        language_max_sequence_length=SEQUENCE,
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        audio_token_id=SOUND,
        audio_start_token_id=SOUND_START,
        audio_end_token_id=SOUND_END,
        thinker_config=Qwen3OmniMoeThinkerConfig(vision_config=vision, audio_config={**audio, **sizes}),
    )


def images_and_sound(rng: random.Random) -> list[Item]:
    """Draw one or two images, and a sound: Bridge's model takes no more than one of a sample."""
    return [*one_or_two(SIZES)(rng), rng.choice(LENGTHS)]


def image_or_sound_tokens(item: Item) -> list[int]:
    """Return the tokens of an image, or of a sound of so many frames."""
    if isinstance(item, tuple):
        return image_tokens(item)
    chunks, rest = divmod(item, 100)
    return [SOUND_START, *[SOUND] * (13 * chunks + (rest + 7) // 8), SOUND_END]


def image_and_sound_inputs(items: list[Item], tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Draw images and a sound."""
    *images, frames = items
    return {
        **patch_inputs(QWEN3_PATCH)(images, tokens, generator),
        "input_features": torch.randn(1, MEL, frames, generator=generator),
        "feature_attention_mask": torch.ones(1, frames, dtype=torch.long),
    }


QWEN3_OMNI = Tower(
    qwen3_omni,
    PATCH_BUCKETS,
    images_and_sound,
    image_or_sound_tokens,
    image_and_sound_inputs,
    forward_step=qwen3_omni_step.forward_step,
    encoders=2,
    eager_runs=EAGER_RUNS_WITH_EXPERTS,
)


SIGLIP_DEPTH, SIGLIP_WIDTH = 6, 1152
SIGLIP_SIDE, SIGLIP_EMBEDDINGS, SIGLIP_PATCHES = 896, 256, 4096


def gemma3_vl() -> Gemma3VLModelProvider:
    """Gemma 3: Hugging Face's SigLIP, images of one size."""
    return Gemma3VLModelProvider(
        **language_model(),
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_config=SiglipVisionConfig(
            num_hidden_layers=SIGLIP_DEPTH,
            hidden_size=SIGLIP_WIDTH,
            num_attention_heads=16,
            intermediate_size=4304,
            image_size=SIGLIP_SIDE,
            patch_size=14,
        ),
        vision_projector_config=Gemma3VLMultimodalProjectorConfig(
            input_size=SIGLIP_WIDTH,
            hidden_size=WIDTH,
            image_size=SIGLIP_SIDE,
            tokens_per_image=SIGLIP_EMBEDDINGS,
            gradient_accumulation_fusion=False,
            bf16=True,
            params_dtype=torch.bfloat16,
        ),
    )


def siglip_tokens(side: int) -> list[int]:
    """Return the tokens of an image."""
    return [START, *[IMAGE] * SIGLIP_EMBEDDINGS]


def images_of_one_size(sides: list[int], tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Draw images of one size."""
    shape = (len(sides), 3, SIGLIP_SIDE, SIGLIP_SIDE)
    return {"visual_inputs": GenericVisualInputs(pixel_values=torch.randn(shape, generator=generator))}


GEMMA3_VL = Tower(
    gemma3_vl, (SIGLIP_PATCHES, 2 * SIGLIP_PATCHES), one_or_two((SIGLIP_SIDE,)), siglip_tokens, images_of_one_size
)


# Where Bridge's provider lets megatron-core's model look for images. It is no token of the language model.
NEMOTRON_IMAGE = 131072
TILE_SIDE, TILE_EMBEDDINGS, TEXT_LENGTH, MOST_TILES = 512, 256, 128, 4
# What a tile counts: its 1024 patches and 16 class tokens, rounded up.
ROOM = 1088
# With attention and MLPs: kernels of Mamba are not installed everywhere.
HYBRID = language_model(
    num_layers=None,
    hybrid_layer_pattern="*-*-",
    seq_length=TEXT_LENGTH + MOST_TILES * TILE_EMBEDDINGS,
    attention_backend=AttnBackend.auto,  # the default is FlashAttention, which is not installed everywhere either
)


def radio(config: Any, *args: Any, **kwargs: Any) -> RADIOViTModel:
    """Build the tower with a few layers; Bridge's providers say 32."""
    config.num_layers = LAYERS
    return RADIOViTModel(config, *args, **kwargs)


def few_layers() -> Any:
    """Let megatron-core's model build the tower with a few layers."""
    return mock.patch.object(llava_model, "RADIOViTModel", radio)


def nemotron_vl() -> NemotronVLModelProvider:
    """Nemotron VL: megatron-core's RADIO on tiles of 512 x 512 pixels."""
    return NemotronVLModelProvider(**HYBRID)


def one_token(tiles: int) -> list[int]:
    """Return the token of an image, in whose place the model puts embeddings of all tiles."""
    return [NEMOTRON_IMAGE]


def tiles(images: list[int], tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Draw the tiles of all images."""
    pixels = torch.randn(sum(images), 3, TILE_SIDE, TILE_SIDE, generator=generator).bfloat16()
    return {
        "visual_inputs": GenericVisualInputs(pixel_values=pixels),
        "num_patches": torch.tensor(images, dtype=torch.int32),
    }


NEMOTRON_VL = Tower(
    nemotron_vl,
    (ROOM, 2 * ROOM, MOST_TILES * ROOM),
    one_or_two((1, 2)),
    one_token,
    tiles,
    length=TEXT_LENGTH,
    forward_step=llava_step.forward_step,
    changed=few_layers,
)


RADIO_PATCH, CLASS_TOKENS = 16, 10
# In no sample. The default is the token that fills samples up.
OMNI_SOUND = 4003
# Patches and class tokens of one image, and of two.
OMNI_BUCKETS = (1088, 1600, 2112)


def nemotron_omni() -> NemotronOmniModelProvider:
    """Nemotron Omni, its vision: megatron-core's RADIO on images of any size, as Bridge's conversion sets it."""
    return NemotronOmniModelProvider(
        **HYBRID,
        language_model_type="nemotron6-moe",
        tokenizer_type="nemotron6-moe",
        image_token_index=IMAGE,
        sound_context_token_id=OMNI_SOUND,
        use_vision_backbone_fp8_arch=False,
        vision_class_token_len=CLASS_TOKENS,
        radio_interpolate_only_cpe=False,
    )


def omni_token(size: tuple[int, int]) -> list[int]:
    """Return the token of an image, in whose place the model puts its embeddings."""
    return [IMAGE]


def patches_of_images(images: list[tuple[int, int]], tokens: Tensor, generator: torch.Generator) -> Inputs:
    """Draw images as patches in one sequence."""
    sizes = torch.tensor(images)
    patches = sizes.prod(1)
    pixels = torch.randn(1, int(patches.sum()), 3 * RADIO_PATCH**2, generator=generator)
    return {
        "visual_inputs": GenericVisualInputs(pixel_values=pixels),
        "imgs_sizes": sizes * RADIO_PATCH,
        "num_image_tiles": (patches // 4).int(),
    }


NEMOTRON_OMNI = Tower(
    nemotron_omni,
    OMNI_BUCKETS,
    one_or_two(SIZES),
    omni_token,
    patches_of_images,
    length=TEXT_LENGTH,
    forward_step=nemotron_omni_step.forward_step,
    changed=few_layers,
)


TOWERS = {
    "qwen25_vl": QWEN25_VL,
    "glm45v": GLM45V,
    "qwen3_omni": QWEN3_OMNI,
    "gemma3_vl": GEMMA3_VL,
    "nemotron_vl": NEMOTRON_VL,
    "nemotron_omni": NEMOTRON_OMNI,
}
