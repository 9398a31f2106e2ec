"""Tokens and sums between ranks that hold other experts, by exchanges whose sizes do not depend on the routing.

Every rank gathers the tokens of all ranks and computes its own experts' part of them; a sum by token returns the parts.
Nothing is read on the host, no token is dropped, and a graph may contain it. All ranks need as many tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

# Stands in the place of a probability where a token does not go to an expert.
NOT_CHOSEN = -1.0


class ExpertExchange:
    """Ranks that hold a part of the experts each, in the order of their ranks.

    Args:
        group: Their process group.

    Attributes:
        ranks: How many there are.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self.ranks = group.size()

    def gather(self, own: Tensor) -> Tensor:
        """Return the rows of all ranks, `[ranks * tokens, width]`; no gradient flows.

        Args:
            own: `[tokens, width]`.
        """
        out = own.new_empty(self.ranks * own.shape[0], own.shape[1])
        distributed.all_gather_into_tensor(out, own.contiguous(), group=self._group)
        return out

    def reduce(self, parts: Tensor) -> Tensor:
        """Return the sum over all ranks of this rank's rows, `[tokens, width]`; no gradient flows.

        Args:
            parts: `[ranks * tokens, width]`.
        """
        out = parts.new_empty(parts.shape[0] // self.ranks, parts.shape[1])
        distributed.reduce_scatter_tensor(out, parts.contiguous(), group=self._group)
        return out

    def swap(self, blocks: Tensor) -> Tensor:
        """Return every rank's block for this rank, `[ranks, ...]`; no gradient flows.

        Args:
            blocks: `[ranks, ...]`, a block for every rank.
        """
        out = torch.empty_like(blocks)
        distributed.all_to_all_single(out, blocks, group=self._group)
        return out

    def choices(self, probabilities: Tensor, routing_map: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the tokens of all ranks chose of this rank's experts.

        Args:
            probabilities: `[tokens, experts]` of this rank's tokens, not negative.
            routing_map: `[tokens, experts]` bool.
            used: `[1]` int32, how many of this rank's tokens are real.

        Returns:
            Probabilities and routing map, `[ranks * tokens, experts of this rank]` each, and how many of these tokens
            to look at, `[1]` int32: all, since padding chose nothing. Where nothing was chosen, the gradient of the
            probability must be zero.
        """
        real = (torch.arange(routing_map.shape[0], device=used.device) < used)[:, None]
        found: Tensor = _Choices.apply(probabilities, routing_map & real, self)
        return found, found.detach() != NOT_CHOSEN, torch.full_like(used, found.shape[0])

    def rehearsal(self, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
        """Take memory for exchanges of this size; returns what makes them, which all ranks call together.

        NCCL connects ranks at the first exchange of a kind, and every rank waits for the others then. Inside a capture,
        which may fail on one rank, the others would wait for ever.
        """
        own = torch.zeros(tokens, width, dtype=dtype, device=device)
        wide = torch.zeros(self.ranks * tokens, width, dtype=summed_in(dtype), device=device)

        def exchange() -> None:
            for count in (1, tokens):  # few bytes may go another way than many
                self.gather(own[:count])
                self.reduce(wide[: self.ranks * count])
                self.swap(wide[: self.ranks * count].view(self.ranks, count, width))

        return exchange


class _Choices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, chosen: Tensor, exchange: ExpertExchange) -> Tensor:
        ctx.exchange = exchange
        tokens, experts = chosen.shape
        marked = torch.where(chosen, probabilities, NOT_CHOSEN).reshape(tokens, exchange.ranks, -1)
        return exchange.swap(marked.transpose(0, 1).contiguous()).view(-1, experts // exchange.ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ranks = ctx.exchange.ranks
        own = ctx.exchange.swap(gradient.contiguous().view(ranks, -1, gradient.shape[1]))
        return own.transpose(0, 1).reshape(own.shape[1], -1), None, None


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums go between ranks, so that they are rounded once."""
    return torch.promote_types(dtype, torch.float32)
