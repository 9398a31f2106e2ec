"""From a routing map to the rows that experts compute, on the device.

Everything here has a fixed output shape and reads nothing on the host, so it can be part of a graph.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Which row of the experts' work is for which token: sorted by expert, then by token.

    There are as many rows as tokens times experts of a token. Those behind the last bound belong to no expert; nobody
    reads what they hold.

    Attributes:
        bounds: `[experts + 1]` int32, where every expert's rows begin; the last is the number of rows in use.
        tokens: `[rows]` int32, every row's token; any behind the last bound.
        entries: `[rows]` int64, every row's place in `[experts, tokens]`; any behind the last bound.
        places: `[tokens, experts of a token]` int32, the rows of every token, descending; -1 for none.
        rows_of: `[tokens, experts]` int32, the row of a token for an expert; -1 for none.
    """

    bounds: Tensor
    tokens: Tensor
    entries: Tensor
    places: Tensor
    rows_of: Tensor


def find_rows(routing_map: Tensor, used: Tensor, top_k: int) -> Rows:
    """Return the rows of a batch of which only the first tokens are real; the others go to no expert.

    Args:
        routing_map: `[tokens, experts]` bool, at most `top_k` in a row.
        used: `[1]` int32, how many tokens are real.
        top_k: Experts of a token.
    """
    count, experts = routing_map.shape
    device = routing_map.device
    token = torch.arange(count, device=device)
    chosen = (routing_map & (token < used)[:, None]).T.contiguous()
    ranks = chosen.view(-1).cumsum(0, dtype=torch.int32)
    bounds = torch.cat((ranks.new_zeros(1), ranks.view(experts, count)[:, -1]))
    rows_of = torch.where(chosen, ranks.view(experts, count) - 1, -1).T.contiguous()
    places = rows_of.topk(top_k, dim=1).values
    numbers = torch.arange(1, count * top_k + 1, dtype=torch.int32, device=device)
    entries = torch.searchsorted(ranks, numbers).clamp(max=count * experts - 1)
    return Rows(bounds, (entries % count).int(), entries, places, rows_of)


def row_weights(probabilities: Tensor, rows: Rows) -> Tensor:
    """Return every row's probability, `[rows]`; any behind the last bound.

    Args:
        probabilities: `[tokens, experts]`, of any floating-point type.
        rows: Of the batch.
    """
    return _RowWeights.apply(probabilities, rows.entries, rows.rows_of)


class _RowWeights(torch.autograd.Function):
    """A gather whose backward is one, too: every token has at most one row for an expert."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, entries: Tensor, rows_of: Tensor) -> Tensor:
        ctx.save_for_backward(rows_of)
        return probabilities.T.reshape(-1)[entries]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rows_of,) = ctx.saved_tensors
        return torch.where(rows_of >= 0, gradient[rows_of.clamp(min=0)], 0), None, None
