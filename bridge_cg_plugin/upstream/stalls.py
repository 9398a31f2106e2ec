"""Ranks that wait for one that never comes: which rank, in what, and an end after a bounded time.

NCCL's watchdog ends a rank whose collective has waited for the time-out, and says nothing of steps and graphs. It does
not know the collectives inside a replayed graph at all: a rank that waits in one, with its host waiting for the device,
would wait for ever.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..announce import warn

# Part of the time-out after which a rank says that it may be waiting, before NCCL ends it.
WARN_AFTER = 0.5
# A look every so many seconds, or more often where the time-out is short.
LOOK_S, LOOKS = 5.0, 40
ENDED = 1  # exit status of a rank that was ended here


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


class StallWatch:
    """Watches, from a thread of its own, a rank's steps and the replays that hold collectives.

    Args:
        end: Ends this process; called with the reason.
        clock: Seconds.
        mark: Makes a mark in the device's work.
    """

    def __init__(
        self,
        end: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        mark: Callable[[], Mark] = torch.cuda.Event,
    ) -> None:
        self._end, self._clock, self._make_mark = end, clock, mark
        self._limit_s = 0.0
        self._doing: _Since | None = None
        self._replay: _Since | None = None
        self._mark: Mark | None = None
        self._warned = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def during(self, doing: str, limit_s: float | None = None) -> Iterator[None]:
        """Watch what runs inside.

        Args:
            doing: What that is, for messages.
            limit_s: The time-out of the run's process groups in seconds; None is that of the last time, and where
                there was none nothing is watched.
        """
        self._limit_s = self._limit_s if limit_s is None else limit_s
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
        if self._mark is None:
            self._mark = self._make_mark()
        self._mark.record()
        self._replay = _Since(replay, self._clock())

    def look(self) -> None:
        """End this rank if its last replay has not ended within the time-out; warn once of a step that lasts long."""
        doing, replay, now = self._doing, self._replay, self._clock()
        if doing is None:
            return
        if replay is not None and now - replay.began > self._limit_s and not self._mark.query():
            self._end(
                f"this rank ends in {doing.what}: the {replay.what} has not ended for {self._limit_s:.0f} s; another "
                "rank that shares these layers did not come to its reductions"
            )
        elif now - doing.began > WARN_AFTER * self._limit_s and not self._warned:
            self._warned = True
            warn(
                f"this rank has been in {doing.what} for {now - doing.began:.0f} s; if it waits for another rank, it "
                f"ends once a collective has waited for {self._limit_s:.0f} s"
            )

    def _watch(self) -> None:
        while True:
            time.sleep(min(LOOK_S, self._limit_s / LOOKS))
            self.look()


def _end_process(reason: str) -> None:
    """End this process at once: its main thread waits for the device and cannot raise."""
    warn(reason)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(ENDED)


STALLS = StallWatch(_end_process)


def timeout_s(config: Any) -> float:
    """Return the time-out of a run's process groups in seconds.

    Args:
        config: Bridge's `ConfigContainer`.
    """
    return 60.0 * config.dist.distributed_timeout_minutes
