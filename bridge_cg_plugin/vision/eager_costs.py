"""Measured times of microbatches, replayed and eager, and whether eager is the faster of the two.

Both are timed during training, forward and backward, on their own stream. Errors favor the replay: a bucket's time is
the smallest of several, because a replay may wait for its own recording or for the first copy of its graph to the
device; eager's time is an upper bound that is never extrapolated, and eager must win by `MARGIN`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..graphs.planning.buckets import Bucket
from ..graphs.recordings.recording import Gradients
from .adapter import EncoderBatch
from .fit import Shape

# Eager must be faster by this factor.
MARGIN = 1.1
# Replays of a bucket that are timed before any decision; the smallest time counts.
TIMED_REPLAYS = 3
# Shapes whose eager time is kept.
KEPT_SHAPES = 512
# Answers that are remembered; a run may meet any number of shapes.
KEPT_ANSWERS = 4096


class Clock(Protocol):
    """Records points in the current stream's work and measures between them without waiting."""

    def event(self) -> Any:
        """Return the point that the stream's work so far ends at."""

    def elapsed(self, start: Any, end: Any) -> float | None:
        """Return milliseconds between two events, or None while the work before `end` still runs."""


class CudaClock:
    """Device events."""

    def event(self) -> torch.cuda.Event:
        """See `Clock`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        """See `Clock`."""
        return start.elapsed_time(end) if end.query() else None


class Timing:
    """Times one microbatch's forward and backward; a `BackwardObserver`.

    Args:
        clock: Measures.
        finished: Called with this object when the backward has ended.
    """

    def __init__(self, clock: Clock, finished: Callable[["Timing"], None]) -> None:
        self._clock, self._finished = clock, finished
        self._events = [clock.event()]

    def forward_ended(self) -> None:
        """Note the end of the forward."""
        self._events.append(self._clock.event())

    def before_backward(self, output_gradients: Sequence[Tensor | None] = ()) -> None:
        """Note the begin of the first backward. See `BackwardObserver`."""
        if len(self._events) == 2:
            self._events.append(self._clock.event())

    def after_backward(self, gradients: Gradients | None = None) -> None:
        """Note the end of the first backward. See `BackwardObserver`."""
        if len(self._events) == 3:
            self._events.append(self._clock.event())
            self._finished(self)

    def milliseconds(self) -> float | None:
        """Return the time of forward plus backward, or None while they still run."""
        backward, forward = self._clock.elapsed(*self._events[2:]), self._clock.elapsed(*self._events[:2])
        return None if forward is None or backward is None else forward + backward


@dataclass(slots=True)
class _Replays:
    """Replays of one bucket: the smallest time in ms, how many are timed, and how many of these have ended."""

    best: float = math.inf
    timed: int = 0
    ended: int = 0


class MeasuredCosts:
    """What replays and eager microbatches took, and which of the two a batch should be.

    Args:
        clock: Measures.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._eager: dict[Shape, float] = {}
        self._replays: dict[Bucket, _Replays] = {}
        self._pending: list[tuple[Timing, Shape | Bucket]] = []
        self._choices: dict[tuple[Shape, Bucket], bool] = {}

    def time_eager(self, batch: EncoderBatch) -> Timing | None:
        """Begin to time an eager microbatch; None where its shape would be one too many."""
        self._collect()
        shape = batch.shape
        if len(self._eager) >= KEPT_SHAPES and shape not in self._eager:
            return None
        return Timing(self._clock, lambda timing: self._pending.append((timing, shape)))

    def time_replay(self, bucket: Bucket) -> Timing | None:
        """Begin to time a replay; None once the bucket's time is known well enough."""
        replays = self._replays.setdefault(bucket, _Replays())
        if replays.timed >= TIMED_REPLAYS:
            return None

        def finished(timing: Timing) -> None:
            if self._replays.get(bucket) is replays:  # else its graph was dropped meanwhile
                replays.timed += 1
                self._pending.append((timing, bucket))

        return Timing(self._clock, finished)

    def eager_is_faster(self, shape: Shape, bucket: Bucket) -> bool:
        """Whether eager was measured to be faster than this bucket's replay."""
        self._collect()
        choice = self._choices.get((shape, bucket))
        if choice is None:
            choice = self.eager_bound(shape) * MARGIN < self.replay_ms(bucket)
            remember(self._choices, (shape, bucket), choice)
        return choice

    def replay_ms(self, bucket: Bucket) -> float:
        """Return the smallest measured time of the bucket's replays in ms, 0 while too few are measured."""
        replays = self._replays.get(bucket)
        return 0.0 if replays is None or replays.ended < TIMED_REPLAYS else replays.best

    def eager_bound(self, shape: Shape) -> float:
        """Return the smallest eager time in ms of a shape that covers this one, infinity if none was measured."""
        return min((ms for other, ms in self._eager.items() if other.covers(shape)), default=math.inf)

    def forget_replays(self) -> None:
        """Forget what replays took: their graphs are gone."""
        self._replays, self._choices = {}, {}
        self._pending = [(timing, key) for timing, key in self._pending if isinstance(key, Shape)]

    def _collect(self) -> None:
        """Take over what has been measured since."""
        if not self._pending:
            return
        waiting = []
        for timing, key in self._pending:
            ms = timing.milliseconds()
            if ms is None:
                waiting.append((timing, key))
            elif isinstance(key, Bucket):
                replays = self._replays[key]
                replays.best, replays.ended = min(replays.best, ms), replays.ended + 1
            else:
                self._eager[key] = min(ms, self._eager.get(key, math.inf))
        if len(waiting) < len(self._pending):
            self._choices = {}
        self._pending = waiting


def remember[Key, Value](answers: dict[Key, Value], key: Key, value: Value) -> None:
    """Keep an answer; a full table is cleared."""
    if len(answers) >= KEPT_ANSWERS:
        answers.clear()
    answers[key] = value


def watch_backward(timing: Timing, output: Tensor) -> None:
    """Let an eager microbatch's backward, from the gradient of `output` to the end of the pass, be timed."""

    def begin(gradient: Tensor) -> None:
        timing.before_backward()
        torch.autograd.Variable._execution_engine.queue_callback(timing.after_backward)

    output.register_hook(begin)
