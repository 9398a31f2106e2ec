"""A module that runs on graphs over a training run: eager until capture, then replays, then its own forward again."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..announce import warn
from .changes.model_watch import NOTHING_EXEMPT, Exempt, ModelWatch
from .errors import CaptureError, OutOfMemoryInCapture, PeerFailed, named
from .executor import Executor
from .fallback import Fallback
from .instance import InstanceMethod
from .region import Region
from .report import merge_statistics, render
from .statistics import RegionStatistics


class GraphedModule(ABC):
    """Stands in for a module's `forward`, on the instance, until `detach`.

    A subclass replays in `_forward`, makes regions in `_record` and says what users should know of them.

    A subclass names itself in `title`, its module in `noun`, its figures' group for loggers in `group`.

    Args:
        model: The module.
        executor: Makes recordings.
        strict: Whether a failed capture raises instead of leaving the module eager.
        before_replay: Called before each replay and eager pass; waits for parameters that are still being gathered.
        exempt: What may change of the module without changing what it computes.

    Attributes:
        slots: Microbatches between forward and backward at once, fixed by a capture.
        failure: Why the last capture failed, None if it did not.
    """

    slots: int = 1
    title: str
    noun: str
    group: str
    out_of_memory_remedy: str

    def __init__(
        self,
        model: nn.Module,
        executor: Executor,
        strict: bool,
        before_replay: Callable[[], None] | None,
        exempt: Exempt = NOTHING_EXEMPT,
    ) -> None:
        self.model, self.executor, self.strict = model, executor, strict
        self.failure: str | None = None
        self._before_replay = before_replay
        self._regions: list[Region] = []
        self._own = RegionStatistics()
        self._paused = 0
        self._exempt = exempt
        self._watch: ModelWatch | None = None
        self._instance = InstanceMethod(model, "forward", self._forward)

    def _eager_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        with nullcontext() if self._watch is None else self._watch.passing():
            return self._instance.original(*args, **kwargs)

    def _followed(self) -> ModelWatch:
        """Return what follows the module from its first recording until `reset`."""
        if self._watch is None:
            self._watch = ModelWatch((self.model,), self._replaced(), (self.model,), self._exempt)
        return self._watch

    def _replaced(self) -> list[tuple[nn.Module, str]]:
        """Return the modules and attributes of theirs that graphs stand in for."""
        return [(self.model, "forward")]

    def _before_eager(self) -> None:
        """Wait for the parameters as a replay does.

        Eager's own hooks could start to gather them in another order, and ranks of a data-parallel group share a
        communicator: one may replay, or have nothing to run, while another runs eager.
        """
        if self._before_replay is not None:
            self._before_replay()

    @abstractmethod
    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward: a replay where possible, eager otherwise."""

    @abstractmethod
    def _record(self) -> None:
        """Plan and capture `_regions`. Any exception leaves the module eager; `reset` must undo what was done."""

    @abstractmethod
    def _recorded(self) -> None:
        """Note that `_record` succeeded. Any exception leaves the module eager."""

    @abstractmethod
    def _warmup_microbatches(self) -> int:
        """Return how many microbatches were observed before capture."""

    @abstractmethod
    def _notes(self) -> dict[str, str]:
        """Return further lines of the report."""

    def detach(self) -> None:
        """Give the module its former forward back and drop all graphs."""
        self.reset()
        self._instance.restore()

    @property
    def captured(self) -> bool:
        """Whether graphs exist."""
        for region in self._regions:
            if not region.captured:
                return False
        return self._regions != []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the module eager inside, with the graphs kept for afterwards."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @property
    def is_paused(self) -> bool:
        """Whether the module is inside `paused`."""
        return self._paused > 0

    def adds_later(self, parameters: Set[nn.Parameter]) -> bool:
        """Whether the backward under way will yet replay what adds to the gradient of one of these parameters."""
        return any(region.adds_later(parameters) for region in self._regions)

    @property
    def _step(self) -> int:
        """Number of the training step under way, from 1."""
        return self._own.step

    def begin_step(self) -> None:
        """Note that a training step begins."""
        self._own.step += 1
        for region in self._regions:
            region.statistics.step = self._step

    @contextmanager
    def step(self) -> Iterator[None]:
        """Be in a training step: its first replay looks whether memory is where it was, the others do not."""
        self.begin_step()
        with ExitStack() as stack:
            for region in self._regions:
                stack.enter_context(region.memory_kept())
            yield

    def capture(self) -> bool:
        """Plan buckets and capture; returns whether graphs exist now.

        Raises:
            CaptureError: Capturing failed and the user asked for a strict run.
        """
        self.reset()
        try:
            self._record()
            self._recorded()
        except BaseException as error:
            self.reset()
            if not isinstance(error, Exception):
                raise
            self._fail(error)
            return False
        self.failure = None
        return True

    def reset(self) -> None:
        """Drop all graphs and their memory; the module runs eager again."""
        for region in self._regions:
            region.reset()
        self._regions = []
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self.executor.device.type == "cuda":
            torch.cuda.synchronize(self.executor.device)
            torch.cuda.empty_cache()

    def _fail(self, error: Exception) -> None:
        out_of_memory = isinstance(error, (OutOfMemoryInCapture, torch.OutOfMemoryError))
        said = [*getattr(error, "__notes__", []), *([self.out_of_memory_remedy] if out_of_memory else [])]
        remedy = "".join(f" {sentence}" for sentence in said)
        self.failure = named(error)
        if self.strict:
            raise CaptureError(f"{self.title} could not be captured: {self.failure}.{remedy}") from error
        if isinstance(error, PeerFailed):
            return  # the rank that failed says it
        warn(f"{self.title} could not be captured, the {self.noun} runs eager: {self.failure}.{remedy}")

    def _fell_back(self, reason: Fallback, tokens: int | None = None) -> None:
        """Count a microbatch that runs eager in the whole module."""
        self._own.fell_back(self.noun, reason, tokens)

    def _note_eager(self) -> None:
        """Let gradients of an eager pass reach `main_grad` after replays."""
        for region in self._regions:
            region.clear()

    def statistics(self) -> RegionStatistics:
        """Return what happened so far, over all regions."""
        total = merge_statistics([self._own, *(region.statistics for region in self._regions)])
        total.warmup_microbatches = self._warmup_microbatches()
        return total

    def report(self) -> str:
        """Return the run's report as text."""
        notes = self._notes()
        if self.failure is not None:
            notes["not captured"] = self.failure
        return render(self.statistics(), self.title, notes)
