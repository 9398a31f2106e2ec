"""Products of rows with the weights of the experts that they belong to.

On a GPU they are the plugin's kernels, which read nothing on the host. Elsewhere, for the reference executor, the same
products expert by expert.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from . import device
from .tables import Tables, table_of_slices


@dataclass(frozen=True, slots=True)
class Expert:
    """Rows of one expert, on the host."""

    number: int
    first: int
    end: int

    @property
    def rows(self) -> slice:
        """Its rows."""
        return slice(self.first, self.end)


def multiply(
    x: Tensor, tokens: Tensor | None, weights: Sequence[Tensor], bounds: Tensor, tables: Tables, transposed: bool
) -> Tensor:
    """Return every row times the weight of its expert; rows behind the last bound hold anything.

    Args:
        x: `[rows, width]`, or `[tokens, width]` with `tokens`.
        tokens: `[rows]` int32, which row of x a row is; None is itself.
        weights: `[out, in]` of every expert.
        bounds: See `Rows`.
        tables: Tables of the weights.
        transposed: Whether x is `out` wide, and the result `in`: the gradient of the input.

    Returns:
        `[rows, out]`, or `[rows, in]`, in x's dtype, summed in fp32.
    """
    if device.runs_kernels(x):
        from . import kernels

        return kernels.multiply(x, tokens, tables.of(weights), weights[0].shape, bounds, transposed)
    count = x.shape[0] if tokens is None else tokens.shape[0]
    out = x.new_zeros(count, weights[0].shape[1 if transposed else 0])
    for expert in _experts(bounds):
        weight = weights[expert.number]
        out[expert.rows] = _taken(x, tokens, expert) @ (weight if transposed else weight.T)
    return out


def add_weight_gradients(
    gradient: Tensor,
    gradient_tokens: Tensor | None,
    x: Tensor,
    x_tokens: Tensor | None,
    bounds: Tensor,
    tables: Tables,
    sums: Sequence[Tensor],
) -> None:
    """Add every expert's weight gradient, summed over its rows in fp32, to its sum.

    Args:
        gradient: `[rows, out]`, or `[tokens, out]` with `gradient_tokens`, of the output.
        gradient_tokens: See `multiply`.
        x: `[rows, in]`, or `[tokens, in]` with `x_tokens`, of the input.
        x_tokens: See `multiply`.
        bounds: See `Rows`.
        tables: Tables of the sums.
        sums: `[out, in]` of every expert, all of one dtype, contiguous.
    """
    if device.runs_kernels(x):
        from . import kernels

        kernels.weight_gradients(gradient, gradient_tokens, x, x_tokens, bounds, tables.of(sums), add=True)
        return
    for expert in _experts(bounds):
        sums[expert.number].add_(_taken(gradient, gradient_tokens, expert).T @ _taken(x, x_tokens, expert))


def new_weight_gradients(
    gradient: Tensor, gradient_tokens: Tensor | None, x: Tensor, x_tokens: Tensor | None, bounds: Tensor
) -> tuple[Tensor, ...]:
    """Return every expert's weight gradient, `[out, in]` each, in x's dtype; see `add_weight_gradients`."""
    experts = bounds.shape[0] - 1
    shape = (experts, gradient.shape[1], x.shape[1])
    if device.runs_kernels(x):
        from . import kernels

        stacked = x.new_empty(shape)
        table = table_of_slices(stacked)
        kernels.weight_gradients(gradient, gradient_tokens, x, x_tokens, bounds, table, add=False)
        return stacked.unbind(0)
    stacked = x.new_zeros(shape)
    for expert in _experts(bounds):
        stacked[expert.number] = _taken(gradient, gradient_tokens, expert).T @ _taken(x, x_tokens, expert)
    return stacked.unbind(0)


def combine(values: Tensor, places: Tensor) -> Tensor:
    """Return for every token the sum of its rows, `[tokens, width]`, summed in fp32 by rising expert.

    Args:
        values: `[rows, width]`.
        places: See `Rows`.
    """
    if device.runs_kernels(values):
        from . import kernels

        return kernels.combine(values, places)
    wide = torch.promote_types(values.dtype, torch.float32)
    total = torch.zeros(places.shape[0], values.shape[1], dtype=wide, device=values.device)
    for place in places.unbind(1):
        total += torch.where((place >= 0)[:, None], values[place.clamp(min=0)].to(wide), 0)
    return total.to(values.dtype)


def _experts(bounds: Tensor) -> Iterator[Expert]:
    for number, (first, end) in enumerate(pairwise(bounds.tolist())):
        if end > first:
            yield Expert(number, first, end)


def _taken(x: Tensor, tokens: Tensor | None, expert: Expert) -> Tensor:
    return x[expert.rows] if tokens is None else x[tokens[expert.rows]]
