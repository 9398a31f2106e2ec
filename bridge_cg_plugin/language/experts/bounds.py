"""How much room the exchange of tokens has: what eager passes needed, with a margin."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, distributed

# Room, by the most that was needed, and what it is a multiple of.
MARGIN, MULTIPLE = 1.25, 16


def room(part: float, tokens: int) -> int:
    """Return the room for so many of a batch's tokens, or rows for each of them."""
    return MULTIPLE * max(1, math.ceil(part * tokens / MULTIPLE))


def needed(routing_map: Tensor, ranks: int) -> Tensor:
    """Return what a layer sends to each rank, `[3, ranks]`: tokens, their experts there, and all of its tokens.

    Args:
        routing_map: `[tokens, experts]` bool.
        ranks: That hold as many experts each.
    """
    there = routing_map.view(routing_map.shape[0], ranks, -1)
    sent, rows = there.any(2).sum(0), there.sum((0, 2))
    return torch.stack([sent, rows, torch.full_like(sent, max(len(there), 1))])


def bounds_of(passes: Sequence[Tensor], group: distributed.ProcessGroup) -> tuple[float, float] | None:
    """Return room for the most that a pass needed on any of these ranks, which all call it after as many passes.

    Args:
        passes: What each needed in every layer, see `needed`.
        group: The ranks.

    Returns:
        For tokens from a rank to a rank, by those that it has; for rows of a rank's experts, by the tokens that all
        ranks have. None without passes.
    """
    if not passes:
        return None
    sent, rows, tokens = torch.stack(tuple(passes)).double().unbind(2)
    most, total = (sent / tokens).max(), torch.stack((rows, tokens))
    distributed.all_reduce(most, distributed.ReduceOp.MAX, group=group)
    distributed.all_reduce(total, group=group)
    return MARGIN * most.item(), MARGIN * (total[0] / total[1]).max().item()
