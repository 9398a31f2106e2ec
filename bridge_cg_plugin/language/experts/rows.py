"""From a routing map to the rows that experts compute, on the device.

Everything here has a fixed output shape and reads nothing on the host, so it can be part of a graph. On a GPU it is two
kernels; elsewhere, for the reference executor, PyTorch's functions.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from . import device


@dataclass(frozen=True, slots=True)
class Rows:
    """Which row of the experts' work is for which token: sorted by expert, then by token.

    There are as many rows as tokens times experts of a token, or as there is room for. Those behind the last bound
    belong to no expert; nobody reads what they hold, here as elsewhere.

    Attributes:
        bounds: `[experts + 1]` int32, where every expert's rows begin; the last is the number of rows in use.
        tokens: `[rows]` int32, every row's token.
        entries: `[rows]` int32, every row's place in `[tokens, experts]`; 0 for those that belong to no expert.
        places: `[tokens, experts of a token]` int32, the rows of every token, ascending; then -1 where there are fewer.
        rows_of: `[tokens, experts]` int32, the row of a token for an expert; -1 for none.
    """

    bounds: Tensor
    tokens: Tensor
    entries: Tensor
    places: Tensor
    rows_of: Tensor


def find_rows(
    routing_map: Tensor, used: Tensor, top_k: int, room: int | None = None, overflow: Tensor | None = None
) -> Rows:
    """Return the rows of a batch of which only the first tokens are real; the others go to no expert.

    Args:
        routing_map: `[tokens, experts]` bool, at most `top_k` in a row.
        used: `[1]` int32, how many tokens are real.
        top_k: Experts of a token.
        room: Rows that there are; None is as many as there may be.
        overflow: `[1]` int32, counted up where there are too few. Rows without room are left out.
    """
    most = routing_map.shape[0] * top_k
    room = most if room is None else min(room, most)
    found = _find_rows(routing_map, used, top_k, room)
    if overflow is None or room == most:
        return found
    overflow += found.bounds[-1:] > room
    return replace(found, bounds=found.bounds.clamp(max=room))


def _find_rows(routing_map: Tensor, used: Tensor, top_k: int, room: int) -> Rows:
    """Return rows whose bounds may be beyond the room."""
    if device.runs_kernels(routing_map):
        from . import kernels

        return Rows(*kernels.find_rows(routing_map, used, top_k, room))
    count, experts = routing_map.shape
    chosen = routing_map & (torch.arange(count) < used)[:, None]
    by_expert = chosen.T.reshape(-1)
    numbers = by_expert.cumsum(0).to(torch.int32) - 1
    by_expert = by_expert & (numbers < room)
    rows_of = torch.where(by_expert, numbers, -1).view(experts, count).T.contiguous()
    # What is not chosen goes into one place more than there are rows.
    places = torch.where(by_expert, numbers, room).long()
    token = torch.arange(count, dtype=torch.int32).repeat(experts)
    expert = torch.arange(experts, dtype=torch.int32).repeat_interleave(count)
    tokens, entries = (
        torch.zeros(room + 1, dtype=torch.int32).scatter(0, places, values)[:-1]
        for values in (token, token * experts + expert)
    )
    bounds = functional.pad(chosen.sum(0).cumsum(0), (1, 0)).to(torch.int32)
    behind = torch.where(rows_of >= 0, rows_of, room).sort(dim=1).values[:, :top_k]
    return Rows(bounds, tokens, entries, torch.where(behind < room, behind, -1), rows_of)


def row_weights(probabilities: Tensor, rows: Rows) -> Tensor:
    """Return every row's probability, `[rows]`; any behind the last bound.

    Args:
        probabilities: `[tokens, experts]`, of any floating-point type.
        rows: Of the batch.
    """
    weights: Tensor = _RowWeights.apply(probabilities, rows.entries, rows.rows_of)
    return weights


class _RowWeights(torch.autograd.Function):
    """A gather whose backward is one, too: every token has at most one row for an expert."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, entries: Tensor, rows_of: Tensor) -> Tensor:
        ctx.save_for_backward(rows_of)
        return probabilities.reshape(-1)[entries]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rows_of,) = ctx.saved_tensors
        return torch.where(rows_of >= 0, gradient[rows_of.clamp(min=0)], 0), None, None
