"""What a region is made of, and what is around it in a run. Data only; a `Piece` lives as long as its region."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from .changes.state import NOTHING_EXEMPT, Exempt
from .planning.buckets import Bucket
from .planning.demand import Demand
from .program import RegionProgram
from .rank_consensus import RankConsensus, SingleRank
from .replays.gradients import Reduction
from .replays.slot import SharedInputs

SINGLE_RANK = SingleRank()
# Entered around everything that is recorded.
Around = Callable[[], AbstractContextManager[None]]
# Turns a part's outputs into what a call returns.
Answer = Callable[[tuple[Tensor, ...]], Any]


def first(outputs: tuple[Tensor, ...]) -> Tensor:
    """Return the first output."""
    return outputs[0]


# A later call whose answer a replayed part has given already: a module, its attribute that is called, and what turns
# the part's outputs into what the call returns.
Follower = tuple[nn.Module, str, Answer]


@dataclass(frozen=True, slots=True)
class CallSite:
    """Where a part is called.

    Attributes:
        owner: Module whose attribute is called with the hidden states first.
        attribute: That attribute.
        answer: Turns the part's outputs into what the call returns.
        followers: Calls after that one, each once, which the part answers too.
    """

    owner: nn.Module
    attribute: str
    answer: Answer = first
    followers: tuple[Follower, ...] = ()

    @property
    def patched(self) -> list[tuple[nn.Module, str]]:
        """The modules and attributes of theirs that the part stands in for."""
        return [(self.owner, self.attribute), *((owner, attribute) for owner, attribute, _ in self.followers)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What is around a module in a run.

    Attributes:
        slots: Microbatches that may be between their forward and their backward at once.
        before_replay: Called before each replay and eager pass; waits for parameters that are still being gathered.
        reduction: What waits for gradients; None hands every gradient over to autograd.
        exempt: What may change of the module without changing what it computes.
        consensus: Ranks that are on graphs together with this one or not at all.
        bucket_consensus: Those of them that see the same microbatches, and so have the same buckets.
    """

    slots: int = 1
    before_replay: Callable[[], None] | None = None
    reduction: Reduction | None = None
    exempt: Exempt = NOTHING_EXEMPT
    consensus: RankConsensus = SINGLE_RANK
    bucket_consensus: RankConsensus = SINGLE_RANK


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one region is made of.

    Attributes:
        program: The piece of the model.
        buckets: What to record for at once.
        site: Where a part of the module is called; None where the module's forward is the call.
        shared: Static inputs that it has in common with other regions.
        has_side_stream: Whether a bucket's recordings have a side stream.
        around: Entered around everything that is recorded.
        growth: What microbatches ask for, where further buckets come while training runs; None where `buckets` are all,
            recorded in every slot and mode.
        shape: Returns the shape that `growth` knows a batch by.
    """

    program: RegionProgram
    buckets: Sequence[Bucket]
    site: CallSite | None = None
    shared: SharedInputs | None = None
    has_side_stream: Callable[[Bucket], bool] = lambda bucket: False
    around: Around = nullcontext
    growth: Demand | None = None
    shape: Callable[[Any], Any] = attrgetter("shape")
