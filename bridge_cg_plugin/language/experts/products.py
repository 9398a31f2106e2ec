"""Products of rows with the weights of the experts that they belong to.

On a GPU they are the plugin's kernels. Elsewhere, for executors without one, every expert multiplies all rows and keeps
its own. Neither reads anything on the host.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import device
from .tables import Tables, table_of_slices


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
    rows = _taken(x, tokens)
    owners = _owners(rows, bounds)
    out = x.new_zeros(rows.shape[0], weights[0].shape[1 if transposed else 0])
    for number, weight in enumerate(weights):
        out = torch.where(owners == number, rows @ (weight if transposed else weight.T), out)
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
    for each, product in zip(sums, _weight_gradients(gradient, gradient_tokens, x, x_tokens, bounds), strict=True):
        each.add_(product)


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
    return _weight_gradients(gradient, gradient_tokens, x, x_tokens, bounds)


def combine(values: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Return for every token the sum of its rows, `[tokens, width]`, summed in fp32 by rising expert.

    Args:
        values: `[rows, width]`.
        places: See `Rows`.
        dtype: Of the sums.
    """
    if device.runs_kernels(values):
        from . import kernels

        return kernels.combine(values, places, dtype)
    wide = torch.promote_types(values.dtype, torch.float32)
    total = torch.zeros(places.shape[0], values.shape[1], dtype=wide, device=values.device)
    for place in places.unbind(1):
        total += torch.where((place >= 0)[:, None], values[place.clamp(min=0)].to(wide), 0)
    return total.to(dtype)


def _weight_gradients(
    gradient: Tensor, gradient_tokens: Tensor | None, x: Tensor, x_tokens: Tensor | None, bounds: Tensor
) -> tuple[Tensor, ...]:
    sides = _taken(gradient, gradient_tokens), _taken(x, x_tokens)
    owners = _owners(sides[0], bounds)
    own = ([torch.where(owners == number, side, 0) for side in sides] for number in range(bounds.shape[0] - 1))
    return tuple(outputs.T @ inputs for outputs, inputs in own)


def _owners(rows: Tensor, bounds: Tensor) -> Tensor:
    """Return every row's expert, `[rows, 1]`; behind the last bound a number that no expert has."""
    places = torch.arange(rows.shape[0], dtype=bounds.dtype, device=rows.device)
    return torch.searchsorted(bounds[1:].contiguous(), places, right=True)[:, None]


def _taken(x: Tensor, tokens: Tensor | None) -> Tensor:
    return x if tokens is None else x[tokens]
