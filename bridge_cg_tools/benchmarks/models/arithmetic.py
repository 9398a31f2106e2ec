"""The time that arithmetic alone takes: matrix products and attention at a rate that the GPU reaches."""

from dataclasses import dataclass
from typing import Any

from bridge_cg_tools.benchmarks.models.workloads import Grid, tokens_of

# What large bf16 matrix products reach on an H200, of 989 TFLOP/s on paper.
TFLOPS = 700
# Forward and both products of the backward, with respect to inputs and to weights.
LINEAR_PASSES = 3.0
# FlashAttention-2 (Dao, arXiv:2307.08691, section 4.1): a forward of two products, a backward of five.
ATTENTION_PASSES = 3.5


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


def step_flops(grid: Grid, tower: TowerShape = TowerShape()) -> float:
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
    patches = (LINEAR_PASSES - 1) * 2 * tokens * tower.patch * h
    return LINEAR_PASSES * linear + ATTENTION_PASSES * tower.layers * attention + patches


def limit_ms(grid: Grid, tower: TowerShape = TowerShape()) -> float:
    """Return the milliseconds that `step_flops` take at `TFLOPS`."""
    return step_flops(grid, tower) / TFLOPS / 1e9
