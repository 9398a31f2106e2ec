"""What the training of a model around one encoder is made of, and what several models share."""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.bridge.training import vlm_step
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from torch import Tensor

# Layers of a tower, and of the language model with its width.
LAYERS, LANGUAGE_LAYERS, WIDTH, HEADS = 4, 2, 1024, 8
VOCABULARY, IMAGE, START, END = 4096, 4000, 4001, 4002
SEQUENCE = 1024
# (height, width) in patches, 2 x 2 of which are an embedding.
SIZES = ((28, 28), (20, 34), (32, 32))
# Patches of one image, and of two.
PATCH_BUCKETS = (1024, 1536, 2048)

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
        length: Tokens of a sample.
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
# A token that another expert takes changes all that follows: gradient norms of eight runs of GLM-4.5V differed in pairs
# by 0.2 to 4 %, so one pair says little.
EAGER_RUNS_WITH_EXPERTS = 4
