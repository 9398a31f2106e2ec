"""Tokens and sums between ranks that hold other experts, by exchanges whose sizes do not depend on the routing.

Every rank sends each rank the tokens that go to its experts, in rows of a fixed number; that rank computes its own
experts' part of them, and a sum by token returns the parts. With room for all tokens every rank gets them all. Nothing
is read on the host, and a graph may contain it. All ranks need as many tokens. Where tokens go is bounded, a flag on
the device tells whether all had room: what was computed is of no use then.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

# Stands in the place of a probability where a token does not go to an expert.
NOT_CHOSEN = -1.0
# Room, by the most that was needed, and what it is a multiple of; eager passes that count.
MARGIN, MULTIPLE, REMEMBERED = 1.25, 16, 64


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


class ExpertExchange:
    """Ranks that hold a part of the experts each, in the order of their ranks.

    Args:
        group: Their process group.
        together: All ranks that are on graphs together with this one; None is the group.
        bounded: Whether `fit` takes bounds from what eager passes needed; there is room for all tokens otherwise.
        shards: Ranks, one after the other, that hold a part of the same experts each.

    Attributes:
        ranks: How many there are.
        holders: How many there are of each part.
        needs: What the last eager passes needed, see `needed`; None without bounds.
        bounds: How much room there is, see `bounds_of`; None is room for all tokens.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup,
        together: distributed.ProcessGroup | None = None,
        bounded: bool = False,
        shards: int = 1,
    ) -> None:
        self._group, self._together, self._shards = group, together or group, shards
        self.ranks, self.holders = group.size(), group.size() // shards
        self.needs: deque[Tensor] | None = deque(maxlen=REMEMBERED) if bounded else None
        self.bounds: tuple[float, float] | None = None

    def fit(self) -> None:
        """Choose bounds by what eager passes needed; all ranks call it, after as many passes."""
        if self.needs is not None:
            self.bounds = bounds_of(self.needs, self._group)

    def rows(self, tokens: int) -> int | None:
        """Return for how many rows a rank's experts have room, by the tokens that all ranks have; None is for all."""
        return None if self.bounds is None else room(self.bounds[1], tokens)

    def places(self, tokens: int) -> int:
        """Return for how many of a rank's tokens there is room on each rank."""
        return tokens if self.bounds is None else min(tokens, room(self.bounds[0], tokens))

    def agree(self, overflow: Tensor) -> None:
        """Let a flag be set on all ranks where it is on one of them."""
        distributed.all_reduce(overflow, group=self._together)

    def gather(self, own: Tensor) -> Tensor:
        """Return the rows `[tokens, width]` of all ranks, one behind the other; no gradient flows."""
        out = own.new_empty(self.ranks * own.shape[0], own.shape[1])
        distributed.all_gather_into_tensor(out, own.contiguous(), group=self._group)
        return out

    def reduce(self, parts: Tensor) -> Tensor:
        """Return the sum over all ranks of this rank's rows among `[ranks * tokens, width]`; no gradient flows."""
        out = parts.new_empty(parts.shape[0] // self.ranks, parts.shape[1])
        distributed.reduce_scatter_tensor(out, parts.contiguous(), group=self._group)
        return out

    def swap(self, blocks: Tensor) -> Tensor:
        """Return every rank's block for this rank among `[ranks, ...]`; no gradient flows."""
        out = torch.empty_like(blocks)
        distributed.all_to_all_single(out, blocks, group=self._group)
        return out

    def for_shards(self, of_experts: Tensor) -> Tensor:
        """Return `[tokens, experts]` for all ranks: what goes to an expert goes to all that hold a part of it."""
        its = of_experts.reshape(len(of_experts), self.holders, 1, -1)
        return its.expand(-1, -1, self._shards, -1).reshape(len(of_experts), -1)

    def lanes(self, routing_map: Tensor, used: Tensor, overflow: Tensor | None = None) -> "Lanes":
        """Return which of this rank's tokens go to which rank.

        Args:
            routing_map: `[tokens, experts]` bool.
            used: `[1]` int32, how many of this rank's tokens are real.
            overflow: `[1]` int32, counted up where there is too little room.
        """
        if self.bounds is None or overflow is None:
            return Lanes(self)
        token = torch.arange(routing_map.shape[0], device=used.device)
        places = self.places(len(token))
        goes = routing_map.reshape(len(token), self.ranks, -1).any(2) & (token < used)[:, None]
        among = goes.cumsum(0) - 1
        overflow += (among[-1] >= places).any()
        goes &= among < places
        # What has no place goes into one more than there are.
        free = torch.full((self.ranks, places + 1), -1, device=used.device)
        tokens = free.scatter(1, torch.where(goes, among, places).T, token.expand(self.ranks, -1))[:, :-1]
        first = torch.arange(self.ranks, device=used.device) * places
        return Lanes(self, tokens, torch.where(goes, among + first, -1))

    def rehearsal(self, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
        """Take memory for exchanges of this size; returns what makes them, which all ranks call together.

        NCCL connects ranks at the first exchange of a kind, and every rank waits for the others then. Inside a capture,
        which may fail on one rank, the others would wait for ever.
        """
        bounded = self.bounds is not None
        places = self.places(tokens)
        own = torch.zeros(0 if bounded else tokens, width, dtype=dtype, device=device)
        wide = torch.zeros(self.ranks * places, width, dtype=summed_in(dtype), device=device)
        flag = torch.zeros(1, dtype=torch.int32, device=device)

        def exchange() -> None:
            for count in (1, places):  # few bytes may go another way than many
                self.swap(wide[: self.ranks * count].view(self.ranks, count, width))
                if not bounded:
                    self.gather(own[:count])
                    self.reduce(wide[: self.ranks * count])
            self.agree(flag)

        return exchange


@dataclass(frozen=True, slots=True)
class Lanes:
    """A batch's way between ranks: as many places for each pair of ranks.

    Attributes:
        exchange: The ranks.
        tokens: `[ranks, places]`, every place's token of this rank, ascending; then -1. None is every token.
        places: `[tokens, ranks]`, every token's place among all for a rank; -1 for none.
    """

    exchange: ExpertExchange
    tokens: Tensor | None = None
    places: Tensor | None = None

    def choices(self, probabilities: Tensor, routing_map: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the tokens that come to this rank chose of its experts.

        Args:
            probabilities: `[tokens, experts]` of this rank's tokens, not negative.
            routing_map: `[tokens, experts]` bool.
            used: `[1]` int32, how many of this rank's tokens are real.

        Returns:
            Probabilities and routing map, `[ranks * places, experts of this rank]` each, and how many of these places
            to look at, `[1]` int32: all, since padding chose nothing. Where nothing was chosen, the gradient of the
            probability must be zero.
        """
        real = (torch.arange(routing_map.shape[0], device=used.device) < used)[:, None]
        found: Tensor = _Choices.apply(probabilities, routing_map & real, self)
        return found, found.detach() != NOT_CHOSEN, torch.full_like(used, found.shape[0])

    def gather(self, own: Tensor) -> Tensor:
        """Return the tokens that come to this rank, `[ranks * places, width]`; no gradient flows.

        Args:
            own: `[tokens, width]`. What lies in free places nobody reads.
        """
        if self.tokens is None:
            return self.exchange.gather(own)
        return self.exchange.swap(own[self.tokens.clamp(min=0)]).flatten(0, 1)

    def returned(self, parts: Tensor) -> Tensor:
        """Return every rank's part of the tokens that went to it, `[ranks * places, width]`; no gradient flows."""
        return self.exchange.swap(parts.view(self.exchange.ranks, -1, parts.shape[1])).flatten(0, 1)


class _Choices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, chosen: Tensor, lanes: Lanes) -> Tensor:
        ctx.lanes, exchange = lanes, lanes.exchange
        tokens, experts = chosen.shape
        marked = torch.where(chosen, probabilities, NOT_CHOSEN).reshape(tokens, exchange.ranks, -1).transpose(0, 1)
        if lanes.tokens is not None:
            its = lanes.tokens[..., None].expand(-1, -1, marked.shape[2])
            marked = torch.where(its < 0, NOT_CHOSEN, marked.gather(1, its.clamp(min=0)))
        return exchange.swap(marked.contiguous()).view(-1, experts // exchange.ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        lanes: Lanes = ctx.lanes
        own = lanes.exchange.swap(gradient.contiguous().view(lanes.exchange.ranks, -1, gradient.shape[1]))
        if lanes.places is None:
            return own.transpose(0, 1).flatten(1), None, None
        places = lanes.places[..., None]
        return torch.where(places >= 0, own.flatten(0, 1)[lanes.places.clamp(min=0)], 0).flatten(1), None, None


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums go between ranks, so that they are rounded once."""
    return torch.promote_types(dtype, torch.float32)
