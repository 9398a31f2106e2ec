"""What a model hands to the engine so that a piece of it can become a graph, and what is around it in a run.

Some ranks must be on graphs together or not at all. Under tensor parallelism the ranks of a group share every layer: if
one replayed a padded microbatch while another ran it eager, their collectives would not fit each other. So they
agree while graphs are made and where a replay is compared with eager; no other step needs a word.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from .buckets import Bucket, Demand
from .changes.state import NOTHING_EXEMPT, Exempt
from .errors import OtherRankFailed, named
from .fallback import Fallback
from .replays.gradients import Reduction
from .replays.slot import Buffers, SharedInputs, TensorSpec


@dataclass(frozen=True, slots=True)
class Agreed:
    """The smallest and the largest of all ranks' values."""

    smallest: float
    largest: float

    @property
    def same(self) -> bool:
        """Whether all ranks have one value."""
        return self.smallest == self.largest


def digest(*planned: object) -> float:
    """Return a number for `RankConsensus.agree` that stands for what a rank planned, by its representation."""
    return float(zlib.crc32(repr(planned).encode()))


class RankConsensus:
    """The ranks that stay together; each calls `agree` as often as the others. Here this rank is alone.

    Attributes:
        ranks: Their numbers in the whole job; none where this rank has nobody to agree with.
    """

    ranks: tuple[int, ...] = ()

    def agree(self, work: Callable[[], float | None]) -> Agreed:
        """Do this rank's work; returns once every rank did its own.

        Args:
            work: Must wait for no other rank, except in an agreement of some of these ranks that all of those take part
                in. Returns a number to compare, None without one. What it raises on this rank is raised again.

        Raises:
            OtherRankFailed: Another rank's work failed.
        """
        value = work() or 0.0
        return Agreed(value, value)


SINGLE_RANK = RankConsensus()


class GroupConsensus(RankConsensus):
    """The ranks of a process group: one reduction of three numbers for each agreement, and names where one failed.

    Args:
        group: The process group.
        device: Where its reductions run.
    """

    def __init__(self, group: distributed.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self.ranks = tuple(distributed.get_process_group_ranks(group))
        # Made here: a rank that runs out of memory must still be able to say so.
        self._numbers = torch.zeros(3, dtype=torch.float64, device=device)

    def agree(self, work: Callable[[], float | None]) -> Agreed:
        """See `RankConsensus`."""
        failure: Exception | None = None
        value = 0.0
        try:
            value = work() or 0.0
        except Exception as error:
            failure = error
        self._numbers.copy_(torch.tensor((float(failure is not None), value, -value), dtype=torch.float64))
        distributed.all_reduce(self._numbers, distributed.ReduceOp.MAX, group=self._group)
        failed, largest, negative = self._numbers.tolist()
        if not failed:
            return Agreed(-negative, largest)
        reasons = self._reasons(failure)
        first = min(reasons)
        if failure is None or distributed.get_rank() != first:
            raise OtherRankFailed(f"rank {first} failed: {reasons[first]}") from failure
        failure.add_note(f"This was rank {first}; ranks {', '.join(map(str, self.ranks))} stay together.")
        raise failure

    def _reasons(self, failure: Exception | None) -> dict[int, str]:
        """Return why ranks failed by themselves, by rank of the whole job."""
        reason = None if failure is None or isinstance(failure, OtherRankFailed) else named(failure)
        own = (distributed.get_rank(), reason)
        found: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(found, own, group=self._group)
        return {rank: reason for rank, reason in found if reason is not None}


class RegionProgram(ABC):
    """A piece of a model with inputs of variable size, made static by padding to a bucket's capacity.

    `forward` sees buffers and the bucket only, never a batch: a value that changes from batch to batch can reach the
    graph through a buffer alone, which is why a replay cannot use another batch's metadata.
    """

    name: str

    @abstractmethod
    def modules(self) -> Sequence[nn.Module]:
        """Return the modules whose parameters `forward` uses."""

    @abstractmethod
    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """Return the bucket's static inputs."""

    def size(self, batch: Any) -> int:
        """Return the batch's size in tokens, known to the host without reading the device."""
        tokens: int = batch.tokens
        return tokens

    def refuse(self, batch: Any, bucket: Bucket) -> Fallback | None:
        """Return why this batch, small enough in tokens, may not use the bucket, or None if it may."""
        return None

    @abstractmethod
    def load(self, buffers: Buffers, batch: Any) -> None:
        """Write the batch into the buffers and zero what it leaves unused, without reading the device."""

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """Write finite values that fill the bucket, for warm-up passes: zeros."""
        for buffer in buffers.values():
            buffer.zero_()

    @abstractmethod
    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """Compute the padded outputs; rows come first in each."""

    def overflow(self, buffers: Buffers) -> Tensor | None:
        """Return what is not zero, once a forward was replayed, where its batch had too little room: `[1]`.

        None where every batch that was not refused has room.
        """
        return None

    @abstractmethod
    def recording(self) -> AbstractContextManager[None]:
        """Return what is entered around each run of `forward` and of its backward that is recorded."""

    def output_rows(self, batch: Any, bucket: Bucket, outputs: Sequence[Tensor]) -> tuple[int, ...]:
        """Return how many leading rows of each padded output are real: the batch's part of the bucket."""
        tokens = self.size(batch)
        return tuple([output.shape[0] * tokens // bucket.tokens for output in outputs])

    def differentiable_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the batch's tensors that match the differentiable specs, in their order; their rows fill the first."""
        return ()


# How far a replay may be from eager, in the L2 norm; far where it does not round as eager, or experts are chosen.
NEAR, FAR = 0.05, 0.15
# Entered around everything that is recorded.
Around = Callable[[], AbstractContextManager[None]]
# Turns a part's outputs into what a call returns.
Answer = Callable[[tuple[Tensor, ...]], Any]
FIRST_OUTPUT: Answer = itemgetter(0)
# A call that a part answers: a module, its attribute that is called, and the answer.
PartCall = tuple[nn.Module, str, Answer]


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
        calls: Of a part of the module: the call that replays it, with the hidden states first, and those after it, each
            once, that it answers too; none where the module's forward is the call.
        shared: Static inputs that it has in common with other regions.
        has_side_stream: Whether a bucket's recordings have a side stream.
        around: Entered around everything that is recorded.
        growth: What microbatches ask for, where further buckets come while training runs; None where `buckets` are all,
            recorded in every slot and mode.
        shape: Returns the shape that `growth` knows a batch by.
        tolerance: Relative difference up to which a replay passes for eager, in the L2 norm.
        exact: Whether outputs of a batch that fills its bucket are bit-equal to eager's.
        real_rows: Returns a mask of the rows of a batch that eager computes, `[rows]` bool; None is all of them.
        standing_in: Entered around eager passes over stand-ins for parameters, for those that modules hold elsewhere.
        counts: Returns tensors besides those of modules in which passes count.
        incomparable: Why replays are not compared with eager; empty where they are.
    """

    program: RegionProgram
    buckets: Sequence[Bucket]
    calls: Sequence[PartCall] = ()
    shared: SharedInputs | None = None
    has_side_stream: Callable[[Bucket], bool] = lambda bucket: False
    around: Around = nullcontext
    growth: Demand | None = None
    shape: Callable[[Any], Any] = attrgetter("shape")
    tolerance: float = NEAR
    exact: bool = False
    real_rows: Callable[[Any], Tensor | None] = lambda batch: None
    standing_in: Around = nullcontext
    counts: Callable[[], Iterable[Tensor]] = tuple
    incomparable: str = ""


class Call(NamedTuple):
    """A call of the module's forward. A tuple: one is made for every replay.

    Attributes:
        batch: The microbatch; None where the call is not one that a graph could take.
        refusal: Why no recording can serve the call, None where one may.
        tokens: The microbatch's size; None where it is not known.
        misfit: What is wrong with the batch, None where nothing is. Eager may take it all the same.
        counts: Whether the call counts as one that a failed capture left eager.
        note: The shape that a `Demand` remembers of the microbatch; None where nothing is to be recorded for it.
    """

    batch: Any
    refusal: Fallback | None = None
    tokens: int | None = None
    misfit: str | None = None
    counts: bool = True
    note: Hashable = None


# Runs a call eager.
Eager = Callable[[], Any]


class Workload(ABC):
    """One kind of module as its manager sees it: calls as batches, what to record, results.

    Attributes:
        manager: The `GraphManager`; set when it is made.
        title: Names the graphs in reports.
        noun: Names the module in messages.
        group: Of the figures for loggers.
        out_of_memory_remedy: What to do where a capture runs out of memory.
        strict: Whether a failed capture raises instead of leaving the module eager.
        observed: Microbatches that were observed before capture.
        outgrown: Whether microbatches had too little room, so that graphs are to be captured again with more.
        demand: What microbatches ask for; None where all that may come is captured at once.
        named: Tokens of the buckets that a capture recorded without a demand; None before.
    """

    manager: Any
    title: str
    noun: str
    group: str
    out_of_memory_remedy: str
    strict = False
    observed = 0
    outgrown = False
    demand: Demand | None = None
    named: tuple[int, ...] | None = None

    @abstractmethod
    def read(self, *args: Any, **kwargs: Any) -> Call:
        """Return what a call of the module's forward is, without reading the device."""

    @abstractmethod
    def observe(self, call: Call) -> None:
        """Look at a call that runs eager before there are graphs."""

    @abstractmethod
    def capture(self) -> None:
        """Plan, and have the manager `record` what is planned. Any exception leaves the module eager."""

    @abstractmethod
    def captured(self) -> None:
        """Tell what was recorded. Any exception leaves the module eager."""

    def forget(self) -> None:
        """Forget what is known of recordings: they are gone."""
        return

    @property
    def buckets(self) -> tuple[int, ...] | None:
        """Tokens of the buckets there are; None before a capture."""
        return self.named if self.demand is None else self.demand.capacities

    def replay(self, region: Any, batch: Any) -> tuple[Tensor, ...] | None:
        """Replay the module's only region; returns None where the batch is to run eager, with the reason counted."""
        outputs: tuple[Tensor, ...] | None = region.run(batch)
        return outputs

    def run_eager(self, call: Call, eager: Eager) -> Any:
        """Return what eager makes of the call."""
        return eager()

    def returned(self, outputs: tuple[Tensor, ...]) -> Any:
        """Return what the module's own forward would return for a replay's outputs: the first, unless overridden."""
        return outputs[0]

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """Return the region's outputs in what the module's own forward returned."""
        return (returned,)

    @abstractmethod
    def notes(self) -> dict[str, str]:
        """Return further lines of the report."""
