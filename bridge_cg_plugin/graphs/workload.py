"""What a module brings that runs on graphs: calls as batches, what to record, results. `GraphManager` has the rest."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from .fallback import Fallback
from .piece import Piece
from .planning.demand import Demand
from .rank_consensus import RankConsensus
from .recordings.chain import Offloading
from .recordings.executor import Executor
from .region import Region
from .reports.statistics import RegionStatistics

Eager = Callable[[], Any]


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


class Manager(Protocol):
    """What a workload uses of its manager; see `GraphManager`.

    Attributes:
        model: The module.
        executor: Makes recordings.
        slots: Microbatches between forward and backward at once.
        step_number: Number of the training step under way, from 1.
        consensus: Ranks that are on graphs together with this one or not at all.
        bucket_consensus: Those of them that see the same microbatches, and so have the same buckets.
    """

    model: nn.Module
    executor: Executor
    slots: int
    step_number: int
    consensus: RankConsensus
    bucket_consensus: RankConsensus

    @property
    def captured(self) -> bool:
        """Whether graphs exist."""

    @property
    def readiness(self) -> tuple[object, ...]:
        """What decides how a microbatch runs besides the microbatch, equal on ranks that run the same one alike."""

    def undone(self) -> AbstractContextManager[None]:
        """Return what passes run in that leave nothing behind."""

    def eager_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""

    def record(
        self,
        pieces: Sequence[Piece],
        demand: Demand | None = None,
        bytes_per_slot: float | None = None,
        offloading: Offloading | None = None,
    ) -> list[Region]:
        """Capture pieces of the module between two steps; returns their regions."""

    def reset(self) -> None:
        """Drop all graphs and their memory."""

    def step(self, may_record: bool = True) -> AbstractContextManager[None]:
        """Be in a training step, before which the module may record something or not."""

    def statistics(self) -> RegionStatistics:
        """Return what happened so far, over all regions."""


class Workload(ABC):
    """One kind of module as `GraphManager` sees it. It belongs to one manager.

    Attributes:
        manager: The manager; set when it is made.
        title: Names the graphs in reports.
        noun: Names the module in messages.
        group: Of the figures for loggers.
        out_of_memory_remedy: What to do where a capture runs out of memory.
        strict: Whether a failed capture raises instead of leaving the module eager.
        counts_tokens: Whether the tokens of each training step are counted.
    """

    manager: Manager
    title: str
    noun: str
    group: str
    out_of_memory_remedy: str
    strict: bool = False
    counts_tokens: bool = False

    def attach(self, manager: Manager) -> None:
        """Note whose workload this is; called once, before the module's first call."""
        self.manager = manager

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

    @abstractmethod
    def forget(self) -> None:
        """Forget what is known of recordings: they are gone."""

    @abstractmethod
    def grown(self) -> None:
        """Note that a recording was tried between two steps: the module's regions may have other buckets."""

    def replay(self, region: Region, batch: Any) -> tuple[Tensor, ...] | None:
        """Replay the module's only region; returns None where the batch is to run eager, with the reason counted."""
        return region.run(batch)

    def run_eager(self, call: Call, eager: Eager) -> Any:
        """Return what eager makes of the call."""
        return eager()

    @abstractmethod
    def returned(self, outputs: tuple[Tensor, ...]) -> Any:
        """Return what the module's own forward would return for a replay's outputs."""

    @abstractmethod
    def warmup_microbatches(self) -> int:
        """Return how many microbatches were observed before capture."""

    @abstractmethod
    def notes(self) -> dict[str, str]:
        """Return further lines of the report."""
