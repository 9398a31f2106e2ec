"""The time that arithmetic alone takes: matrix products and attention at a rate that the GPU reaches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.performance.models.workloads import Grid, tokens_of

# What large bf16 matrix products reach on an H200, of 989 TFLOP/s on paper.
TFLOPS = 700
# FlashAttention-2 (Dao, arXiv:2307.08691, section 4.1): a forward of two products, a backward of five.
ATTENTION_PASSES = 3.5


@dataclass(frozen=True, slots=True)
class Trained:
    """What of a model is trained, which decides the products of its backward.

    Attributes:
        weights: Whether its weights get gradients, but for adapters, which are too small to count.
        inputs: Whether gradients pass through it, for adapters or for what lies before.
    """

    weights: bool = True
    inputs: bool = True

    @property
    def linear_passes(self) -> float:
        """Products of a linear layer for one of its forward."""
        return 1.0 + self.weights + self.inputs

    @property
    def attention_passes(self) -> float:
        """Work of attention for that of its forward."""
        return ATTENTION_PASSES if self.inputs else 1.0


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Sizes of a vision tower; defaults are Qwen3-VL-8B's.

    Attributes:
        mergers: The last one and those of deepstack.
        merged: Patches of one embedding.
        patch: Values of one patch.
        out: Width of the embeddings.
    """

    layers: int = 27
    hidden: int = 1152
    mlp: int = 4304
    mergers: int = 4
    merged: int = 4
    patch: int = 1536
    out: int = 4096


def shape_of(model: Any) -> TowerShape:
    """Return the sizes of Bridge's vision model."""
    config = model.config
    return TowerShape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        mlp=config.ffn_hidden_size,
        mergers=1 + len(model.decoder.deepstack_merger_list),
        merged=config.spatial_merge_size**2,
        patch=config.in_channels * config.temporal_patch_size * config.patch_size**2,
        out=config.out_hidden_size,
    )


def step_flops(grid: Grid, tower: TowerShape = TowerShape(), trained: Trained = Trained()) -> float:
    """Return the floating-point operations of forward plus backward.

    A matrix product of `n x k` with `k x m` is 2nkm, a backward two more of the same size (Kaplan et al.,
    arXiv:2001.08361, section 2.1); patches need no gradient. A layer has four products: queries, keys and values (3
    hidden^2), projection (hidden^2) and the MLP's two. Attention of a frame of s patches is two products of s x s x
    hidden, and 3.5 times that with its backward. A merger has two products, of 4 hidden with 4 hidden and with the
    output's width, on a quarter of the tokens. Norms, activations and the like are not counted.
    """
    tokens, h = tokens_of(grid), tower.hidden
    layer = 2 * tokens * (4 * h * h + 2 * h * tower.mlp)
    attention = sum(t * 4 * (rows * columns) ** 2 * h for t, rows, columns in grid)
    wide = tower.merged * h
    merger = 2 * tokens / tower.merged * (wide * wide + wide * tower.out)
    linear = tower.layers * layer + tower.mergers * merger
    patches = (1 + trained.weights) * 2 * tokens * tower.patch * h
    return trained.linear_passes * linear + trained.attention_passes * tower.layers * attention + patches


@dataclass(frozen=True, slots=True)
class LanguageModelShape:
    """Sizes of a language model whose MLPs or experts are gated.

    Attributes:
        queries: Width of all queries.
        keys: Width of all keys, which is that of the values.
        mlp: Width of the MLP, or of all experts that a token goes through.
        routed: Experts that a router chooses from.
    """

    layers: int
    hidden: int
    queries: int
    keys: int
    mlp: int
    vocabulary: int
    routed: int = 0


def language_model_shape_of(model: Any) -> LanguageModelShape:
    """Return the sizes of megatron-core's language model; with experts every layer has them."""
    config = model.config
    mlp = config.ffn_hidden_size
    if config.num_moe_experts:
        shared = config.moe_shared_expert_intermediate_size or 0
        mlp = config.moe_router_topk * config.moe_ffn_hidden_size + shared
    return LanguageModelShape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        queries=config.num_attention_heads * config.kv_channels,
        keys=(config.num_query_groups or config.num_attention_heads) * config.kv_channels,
        mlp=mlp,
        vocabulary=model.vocab_size,
        routed=config.num_moe_experts or 0,
    )


def language_model_flops(documents: Sequence[int], model: LanguageModelShape, trained: Trained = Trained()) -> float:
    """Return the floating-point operations of forward plus backward, counted as `step_flops` counts.

    A token's products are those of queries, keys and values, of the projection, of a gated MLP (three), of a router,
    and of the output layer. Causal attention looks at half of a document's square.

    Args:
        documents: Tokens of each.
        model: Its sizes.
        trained: What of it is trained.
    """
    tokens, h = sum(documents), model.hidden
    layer = 2 * h * (2 * model.queries + 2 * model.keys + 3 * model.mlp + model.routed)
    attention = sum(2 * length**2 * model.queries for length in documents)
    linear = tokens * (model.layers * layer + 2 * h * model.vocabulary)
    return trained.linear_passes * linear + trained.attention_passes * model.layers * attention


def limit_ms(grid: Grid, tower: TowerShape = TowerShape()) -> float:
    """Return the milliseconds that `step_flops` take at `TFLOPS`."""
    return step_flops(grid, tower) / TFLOPS / 1e9
