"""Watchdog: ends the process when a replay hangs because another rank did not join a collective.

NCCL's watchdog ends a rank whose collective timed out, without naming the step or the graph. It does not see the
collectives inside a replayed graph: without this watchdog, a rank that hangs in one would hang for ever.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..environment import watchdog_minutes
from .failures import several_ranks
from .watchdog_beats import Beats
from .watchdog_exit import ReplayTimeout, end_process, warn_in_thread
from .watchdog_process import COUNTED, WARN_AFTER, interval_between_checks, slow


class Event(Protocol):
    """A CUDA event, or a test's."""

    def record(self) -> None:
        """Move it behind what was launched so far."""

    def query(self) -> bool:
        """Whether the device is past it."""


@dataclass(frozen=True, slots=True)
class _Since:
    """What began when, on the watchdog's clock."""

    what: str
    began: float


@dataclass(frozen=True, slots=True)
class _Launch:
    """A replay and the event behind it, which is recorded once."""

    replay: str
    event: Event


def replay_limit_s(timeout_s: float) -> float:
    """Return after how many seconds a replay counts as hung.

    Args:
        timeout_s: The time-out of the run's process groups.

    Raises:
        OptionError: The time in the environment is invalid.
    """
    minutes = watchdog_minutes()
    return 60.0 * minutes if minutes else timeout_s


class Watchdog:
    """Watches, from its own thread, a rank's steps and the replays that contain collectives.

    Each launch has its own event, and both are set in one assignment, so a check that overlaps with launches reads one
    of them completely. A launch's time is counted from the first check that found it.

    Args:
        end: Called once for a replay that timed out, from the watchdog's thread.
        clock: Seconds.
        event: Makes an event.
        allowed: Time-out of the process groups -> seconds that a replay may take.
        warn: Writes a warning; it must not wait for a lock.
        beats: Tells another process that this one runs Python; None where there is none.
    """

    def __init__(
        self,
        end: Callable[[ReplayTimeout], None],
        clock: Callable[[], float] = time.monotonic,
        event: Callable[[], Event] = torch.cuda.Event,
        allowed: Callable[[float], float] = replay_limit_s,
        warn: Callable[[str], None] = warn_in_thread,
        beats: Beats | None = None,
    ) -> None:
        self._end, self._clock, self._make_event = end, clock, event
        self._allowed, self._warn, self._beats = allowed, warn, beats
        self._limit_s = self._replay_limit_s = 0.0
        self._doing: _Since | None = None
        self._launch: _Launch | None = None
        self._warned = False
        self._thread: threading.Thread | None = None
        # Whether the other process need not hear of the next launch.
        self._told = True
        # Used by the watchdog's thread only.
        self._seen: _Launch | None = None
        self._waited_s = self._checked = 0.0
        self._settled = False

    @property
    def interval_s(self) -> float:
        """Seconds between two checks."""
        return interval_between_checks(self._limit_s, self._replay_limit_s)

    @contextmanager
    def during(self, doing: str, limit_s: float | None = None) -> Iterator[None]:
        """Watch what runs inside.

        Args:
            doing: What that is, for messages.
            limit_s: The time-out of the run's process groups in seconds; None is that of the last time, and where
                there was none nothing is watched.

        Raises:
            OptionError: The time that the environment gives replays is invalid.
        """
        if limit_s is not None:
            self._limit_s, self._replay_limit_s = limit_s, self._allowed(limit_s)
        if not self._limit_s:
            yield
            return
        before = self._doing
        if self._thread is None:
            self._start()
        self._turn_to(_Since(doing, self._clock()))
        try:
            yield
        finally:
            self._turn_to(before)

    def launched(self, replay: str) -> None:
        """Note that a replay with collectives was launched on the current stream."""
        event = self._make_event()
        event.record()
        self._launch = _Launch(replay, event)
        if not self._told and self._beats is not None:
            self._told = True
            self._beats.start()
            self._beat()

    def check(self) -> None:
        """Report the last replay once if it timed out; warn once about a step that takes long."""
        doing, now = self._doing, self._clock()
        self._count(self._launch, now)
        self._beat()
        if doing is None:
            return
        late = self._timed_out()
        if late is not None:
            self._settled = True
            self._end(ReplayTimeout(doing.what, late.replay, self._replay_limit_s))
        elif now - doing.began > WARN_AFTER * self._limit_s and not self._warned:
            self._warned = True
            self._warn(slow(doing.what, now - doing.began, self._limit_s))

    def _start(self) -> None:
        """Start the watchdog's thread; one of several ranks also has the other process from now on."""
        self._thread = threading.Thread(target=self._watch, name="bridge-cg-watchdog", daemon=True)
        self._thread.start()
        if self._beats is not None and several_ranks():
            self._beats.start()

    def _turn_to(self, doing: _Since | None) -> None:
        """Note what this rank is doing, also for the other process: the next call may keep all threads from running."""
        self._doing, self._told = doing, False
        self._beat()

    def _beat(self) -> None:
        """Tell the other process what this rank is doing and which replay may wait."""
        if self._beats is None:
            return
        doing, launch = self._doing, self._launch
        if launch is self._seen and self._settled:
            launch = None
        self._beats.send(
            doing.what if doing else "", launch.replay if launch else "", self._replay_limit_s, self._limit_s
        )

    def _count(self, launch: _Launch | None, now: float) -> None:
        """Add the time since the last check to the last launch's time."""
        passed_s, self._checked = now - self._checked, now
        if launch is self._seen:
            self._waited_s += min(passed_s, COUNTED * self.interval_s)
        else:
            self._seen, self._waited_s, self._settled = launch, 0.0, False

    def _timed_out(self) -> _Launch | None:
        """Return the launch if it has not ended within the limit; its event is queried once."""
        if self._seen is None or self._settled or self._waited_s <= self._replay_limit_s:
            return None
        try:
            self._settled = self._seen.event.query()
        except RuntimeError:  # the device failed, which the training thread sees too
            self._settled = True
        return None if self._settled else self._seen

    def _watch(self) -> None:
        try:
            while True:
                time.sleep(self.interval_s)
                self.check()
        finally:  # an error ended this thread: nobody would beat
            if self._beats is not None:
                self._beats.stop()


WATCHDOG = Watchdog(end_process, beats=Beats())


def timeout_s(config: Any) -> float:
    """Return the time-out of a run's process groups in seconds.

    Args:
        config: Bridge's `ConfigContainer`.
    """
    minutes: float = config.dist.distributed_timeout_minutes
    return 60.0 * minutes
