"""Linear layers of experts as autograd functions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...graphs.recordings.recording import sum_of
from ...upstream_types import MegatronParameter
from . import device
from .device import Tables, table_of_slices
from .exchange import Lanes, summed_in
from .rows import Rows


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


def weighted_swiglu(inner: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
    """Return `silu(gate) * linear * weight` of every row on a GPU, computed in fp32 and rounded once.

    Args:
        inner: `[rows, 2 * width]`: the gate, then what it lets through.
        weights: `[rows]`, the router's probabilities.
        bounds: See `Rows`.

    Returns:
        `[rows, width]` in the dtype of `inner`; rows behind the last bound hold anything.
    """
    out: Tensor = _WeightedSwiglu.apply(inner, weights, bounds)
    return out


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
        from . import kernels

        ctx.save_for_backward(inner, weights, bounds)
        return kernels.swiglu(inner, weights, bounds)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        from . import kernels

        return *kernels.swiglu_backward(gradient.contiguous(), *ctx.saved_tensors), None


# Both factors of a product whose rows belong to experts: each with its rows' tokens or None, then the experts' bounds.
Sides = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor]


def dispatch_linear(
    x: Tensor, rows: Rows, weights: Sequence[nn.Parameter], tables: Tables, lanes: Lanes | None = None
) -> Tensor:
    """Return each token's row for each of its experts, times that expert's weight.

    Args:
        x: `[tokens, in]`.
        rows: Of the batch; with lanes, of the tokens that come to this rank.
        weights: `[out, in]` of every expert. Gradients are added to their `main_grad` if they have one.
        tables: Tables of the weights and sums.
        lanes: The batch's way to ranks that hold other experts; None without any.

    Returns:
        `[rows, out]`; rows behind the last bound hold anything.
    """
    out: Tensor = _ExpertLinear.apply(x, rows, tables, lanes, True, *weights)
    return out


def combine_linear(
    x: Tensor, rows: Rows, weights: Sequence[nn.Parameter], tables: Tables, lanes: Lanes | None = None
) -> Tensor:
    """Return the sum of each token's rows, `[tokens, out]`, each times its expert's weight; those of all ranks.

    Args:
        x: `[rows, in]`.
        rows: Of the batch.
        weights: See `dispatch_linear`.
        tables: See `dispatch_linear`.
        lanes: See `dispatch_linear`.
    """
    out: Tensor = _ExpertLinear.apply(x, rows, tables, lanes, False, *weights)
    return out


class _ExpertLinear(torch.autograd.Function):
    """Either the input is read, or the output added up, by token; the gradient is then the other way round."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Rows,
        tables: Tables,
        lanes: Lanes | None,
        dispatches: bool,
        *weights: nn.Parameter,
    ) -> Tensor:
        if dispatches and lanes is not None:
            x = lanes.gather(x)
        ctx.save_for_backward(x, rows.bounds, rows.tokens, rows.places)
        # Parameters are nobody's to move; autograd would unpack others than those that hold `main_grad`.
        ctx.weights, ctx.tables, ctx.lanes, ctx.dispatches = weights, tables, lanes, dispatches
        out = multiply(x, rows.tokens if dispatches else None, weights, rows.bounds, tables, transposed=False)
        return out if dispatches else _combined(out, rows.places, lanes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, bounds, tokens, places = ctx.saved_tensors
        gradient = gradient.contiguous()
        if not ctx.dispatches and ctx.lanes is not None:
            gradient = ctx.lanes.gather(gradient)
        x_tokens, gradient_tokens = (tokens, None) if ctx.dispatches else (None, tokens)
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = multiply(gradient, gradient_tokens, ctx.weights, bounds, ctx.tables, transposed=True)
            if ctx.dispatches:
                x_gradient = _combined(x_gradient, places, ctx.lanes)
        weight_gradients: Sequence[Tensor | None] = (None,) * len(ctx.weights)
        if all(ctx.needs_input_grad[5:]):
            sides: Sides = (gradient, gradient_tokens, x, x_tokens, bounds)
            weight_gradients = _gradients_of(ctx.weights, sides, ctx.tables)
        return x_gradient, None, None, None, None, *weight_gradients


def _combined(values: Tensor, places: Tensor, lanes: Lanes | None) -> Tensor:
    """Return the sums of tokens' rows, those of other ranks included, rounded once."""
    if lanes is None:
        return combine(values, places, values.dtype)
    parts = combine(values, places, summed_in(values.dtype))
    if lanes.places is None:
        return lanes.exchange.reduce(parts).to(values.dtype)
    return combine(lanes.returned(parts), lanes.places, values.dtype)


def _gradients_of(weights: Sequence[MegatronParameter], sides: Sides, tables: Tables) -> Sequence[Tensor | None]:
    """Return the gradients; those added to `main_grad` are empty, by the convention of fused accumulation."""
    sums = [main_grad for weight in weights if (main_grad := sum_of(weight)) is not None]
    if len(sums) < len(weights):
        return new_weight_gradients(*sides)
    add_weight_gradients(*sides, tables, sums)
    for weight in weights:
        weight.grad_added_to_main_grad = True
    return [weight.new_empty(()).expand_as(weight) for weight in weights]
