"""Ranks that wait for one that never comes: which rank, in what, and an end after a bounded time.

NCCL's watchdog ends a rank whose collective has waited for the time-out, and says nothing of steps and graphs. It does
not know the collectives inside a replayed graph at all: a rank that waits in one, with its host waiting for the device,
would wait for ever.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..environment import watchdog_minutes
from .watchdog_exit import Stall, act, warn_beside

# Part of the time-out after which a rank says that it may be waiting, before NCCL ends it.
WARN_AFTER = 0.5
# A look every so many seconds, or more often where the time-out is short.
LOOK_S, LOOKS = 5.0, 40
# Of the time between two looks so many intervals count at most: the rest of it this process did not run.
COUNTED = 2


class Mark(Protocol):
    """A point in the device's work; a CUDA event."""

    def record(self) -> None:
        """Move it behind what was launched so far."""

    def query(self) -> bool:
        """Whether the device is past it."""


@dataclass(frozen=True, slots=True)
class _Since:
    """What began when, on the watch's clock."""

    what: str
    began: float


@dataclass(frozen=True, slots=True)
class _Launch:
    """A replay and the mark behind it, which is never recorded again."""

    replay: str
    mark: Mark


def replay_limit_s(timeout_s: float) -> float:
    """Return after how many seconds a replay counts as one that waits for ever.

    Args:
        timeout_s: The time-out of the run's process groups.

    Raises:
        OptionError: The time in the environment is invalid.
    """
    minutes = watchdog_minutes()
    return 60.0 * minutes if minutes else timeout_s


class Watchdog:
    """Watches, from a thread of its own, a rank's steps and the replays that hold collectives.

    A launch makes a mark of its own and puts it in place together with its name, so a look that overlaps with launches
    sees one of them whole. A launch's time is counted look by look, from the first that saw it.

    Args:
        end: Called once for a replay that waits for ever, from the watch's thread.
        clock: Seconds.
        mark: Makes a mark in the device's work.
        allowed: Time-out of the process groups -> seconds that a replay may take.
        tell: Writes a warning; it must not wait for a lock.
    """

    def __init__(
        self,
        end: Callable[[Stall], None],
        clock: Callable[[], float] = time.monotonic,
        mark: Callable[[], Mark] = torch.cuda.Event,
        allowed: Callable[[float], float] = replay_limit_s,
        tell: Callable[[str], None] = warn_beside,
    ) -> None:
        self._end, self._clock, self._make_mark = end, clock, mark
        self._allowed, self._tell = allowed, tell
        self._limit_s = self._replay_limit_s = 0.0
        self._doing: _Since | None = None
        self._launch: _Launch | None = None
        self._warned = False
        self._thread: threading.Thread | None = None
        # Of the watch's thread alone.
        self._seen: _Launch | None = None
        self._waited_s = self._looked = 0.0
        self._settled = False

    @property
    def interval_s(self) -> float:
        """Seconds between two looks."""
        return min(LOOK_S, self._limit_s / LOOKS, self._replay_limit_s / LOOKS)

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
        before, self._doing = self._doing, _Since(doing, self._clock())
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="bridge-cg-stalls", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            self._doing = before

    def launched(self, replay: str) -> None:
        """Note that a replay with collectives was launched on the current stream."""
        mark = self._make_mark()
        mark.record()
        self._launch = _Launch(replay, mark)

    def look(self) -> None:
        """Tell of the last replay once if it waits for ever; warn once of a step that lasts long."""
        doing, now = self._doing, self._clock()
        self._count(self._launch, now)
        if doing is None:
            return
        stalled = self._stalled()
        if stalled is not None:
            self._settled = True
            self._end(Stall(doing.what, stalled.replay, self._replay_limit_s))
        elif now - doing.began > WARN_AFTER * self._limit_s and not self._warned:
            self._warned = True
            self._tell(
                f"this rank has been in {doing.what} for {now - doing.began:.0f} s; if it waits for another rank, it "
                f"ends once a collective has waited for {self._limit_s:.0f} s"
            )

    def _count(self, launch: _Launch | None, now: float) -> None:
        """Add to the last launch's time what passed since the look before."""
        passed_s, self._looked = now - self._looked, now
        if launch is self._seen:
            self._waited_s += min(passed_s, COUNTED * self.interval_s)
        else:
            self._seen, self._waited_s, self._settled = launch, 0.0, False

    def _stalled(self) -> _Launch | None:
        """Return the launch that was seen if it has not ended within its time; the device is asked once then."""
        if self._seen is None or self._settled or self._waited_s <= self._replay_limit_s:
            return None
        try:
            self._settled = self._seen.mark.query()
        except RuntimeError:  # the device failed, which the training thread is told too
            self._settled = True
        return None if self._settled else self._seen

    def _watch(self) -> None:
        while True:
            time.sleep(self.interval_s)
            self.look()


WATCHDOG = Watchdog(act)


def timeout_s(config: Any) -> float:
    """Return the time-out of a run's process groups in seconds.

    Args:
        config: Bridge's `ConfigContainer`.
    """
    minutes: float = config.dist.distributed_timeout_minutes
    return 60.0 * minutes
