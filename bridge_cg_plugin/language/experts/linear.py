"""Linear layers of experts as autograd functions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...graphs.recordings.parameters import sum_of
from ...upstream_types import MegatronParameter
from .exchange import ExpertExchange, summed_in
from .products import add_weight_gradients, combine, multiply, new_weight_gradients
from .rows import Rows
from .tables import Tables

# Both factors of a product whose rows belong to experts: each with its rows' tokens or None, then the experts' bounds.
Sides = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor]


def dispatch_linear(
    x: Tensor, rows: Rows, weights: Sequence[nn.Parameter], tables: Tables, exchange: ExpertExchange | None = None
) -> Tensor:
    """Return each token's row for each of its experts, times that expert's weight.

    Args:
        x: `[tokens, in]`.
        rows: Of the batch; with an exchange, of all ranks' tokens.
        weights: `[out, in]` of every expert. Gradients are added to their `main_grad` if they have one.
        tables: Tables of the weights and sums.
        exchange: Ranks that hold other experts; None without any.

    Returns:
        `[rows, out]`; rows behind the last bound hold anything.
    """
    out: Tensor = _ExpertLinear.apply(x, rows, tables, exchange, True, *weights)
    return out


def combine_linear(
    x: Tensor, rows: Rows, weights: Sequence[nn.Parameter], tables: Tables, exchange: ExpertExchange | None = None
) -> Tensor:
    """Return the sum of each token's rows, `[tokens, out]`, each times its expert's weight; those of all ranks.

    Args:
        x: `[rows, in]`.
        rows: Of the batch.
        weights: See `dispatch_linear`.
        tables: See `dispatch_linear`.
        exchange: See `dispatch_linear`.
    """
    out: Tensor = _ExpertLinear.apply(x, rows, tables, exchange, False, *weights)
    return out


class _ExpertLinear(torch.autograd.Function):
    """Either the input is read, or the output added up, by token; the gradient is then the other way round."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Rows,
        tables: Tables,
        exchange: ExpertExchange | None,
        dispatches: bool,
        *weights: nn.Parameter,
    ) -> Tensor:
        if dispatches and exchange is not None:
            x = exchange.gather(x)
        ctx.save_for_backward(x, rows.bounds, rows.tokens, rows.places)
        # Parameters are nobody's to move; autograd would unpack others than those that hold `main_grad`.
        ctx.weights, ctx.tables, ctx.exchange, ctx.dispatches = weights, tables, exchange, dispatches
        out = multiply(x, rows.tokens if dispatches else None, weights, rows.bounds, tables, transposed=False)
        return out if dispatches else _combined(out, rows.places, exchange)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, bounds, tokens, places = ctx.saved_tensors
        gradient = gradient.contiguous()
        if not ctx.dispatches and ctx.exchange is not None:
            gradient = ctx.exchange.gather(gradient)
        x_tokens, gradient_tokens = (tokens, None) if ctx.dispatches else (None, tokens)
        x_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = multiply(gradient, gradient_tokens, ctx.weights, bounds, ctx.tables, transposed=True)
            if ctx.dispatches:
                x_gradient = _combined(x_gradient, places, ctx.exchange)
        weight_gradients: Sequence[Tensor | None] = (None,) * len(ctx.weights)
        if all(ctx.needs_input_grad[5:]):
            sides: Sides = (gradient, gradient_tokens, x, x_tokens, bounds)
            weight_gradients = _weight_gradients(ctx.weights, sides, ctx.tables)
        return x_gradient, None, None, None, None, *weight_gradients


def _combined(values: Tensor, places: Tensor, exchange: ExpertExchange | None) -> Tensor:
    """Return the sums of tokens' rows, those of other ranks included, rounded once."""
    if exchange is None:
        return combine(values, places, values.dtype)
    return exchange.reduce(combine(values, places, summed_in(values.dtype))).to(values.dtype)


def _weight_gradients(weights: Sequence[MegatronParameter], sides: Sides, tables: Tables) -> Sequence[Tensor | None]:
    """Return the gradients; those added to `main_grad` are empty, by the convention of fused accumulation."""
    sums = [main_grad for weight in weights if (main_grad := sum_of(weight)) is not None]
    if len(sums) < len(weights):
        return new_weight_gradients(*sides)
    add_weight_gradients(*sides, tables, sums)
    for weight in weights:
        weight.grad_added_to_main_grad = True
    return [weight.new_empty(()).expand_as(weight) for weight in weights]
