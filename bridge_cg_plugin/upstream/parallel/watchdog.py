"""Ranks that do not come: to the first step, without the plugin, or to a collective inside a replay.

NCCL's watchdog ends a rank whose collective timed out, without naming the step or the graph. It does not see the
collectives inside a replayed graph: without this watchdog, a rank that hangs in one would hang for ever. The watchdog
is one thread of Python, so it does not run while a call holds the interpreter's lock (GIL).
"""

import faulthandler
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed

from ...announce import warn
from ...options import OptionError
from ...switches import PLUGIN

# Exit status of a process that is ended here, the same as that of the `timeout` command.
TIMEOUT_STATUS = 124
# Seconds that a report may take; a locked logger or a full pipe must not keep the process.
REPORT_S = 30.0
# Seconds between two checks; with a short limit, the limit over the number of checks.
CHECK_S, CHECKS = 5.0, 40
# At most so many intervals count between two checks: for the rest of the time this process did not run.
COUNTED = 2
# A replay, and an event behind it that is recorded once.
Launch = tuple[str, torch.cuda.Event]


class Watchdog:
    """Watches, from its own thread, a rank's steps and the replays that contain collectives.

    Each launch has its own event, and both are set in one assignment, so a check that overlaps with launches reads one
    of them completely. A launch's time is counted from the first check that found it.

    Args:
        end: Called once with the message about a replay that timed out, from the watchdog's thread.
        clock: Seconds.
        event: Makes an event.
    """

    def __init__(
        self,
        end: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        event: Callable[[], torch.cuda.Event] = torch.cuda.Event,
    ) -> None:
        self._end, self._clock, self._make_event = end, clock, event
        self._limit_s = 0.0
        self._doing: str | None = None
        self._launch: Launch | None = None
        self._thread: threading.Thread | None = None
        # Used by the watchdog's thread only.
        self._seen: Launch | None = None
        self._waited_s = self._checked = 0.0
        self._settled = False

    @property
    def interval_s(self) -> float:
        """Seconds between two checks."""
        return min(CHECK_S, self._limit_s / CHECKS)

    @contextmanager
    def during(self, doing: str, limit_s: float | None = None) -> Iterator[None]:
        """Watch what runs inside.

        Args:
            doing: What that is, for messages.
            limit_s: The time-out of the run's process groups in seconds; None is that of the last time, and where
                there was none nothing is watched.
        """
        if limit_s is not None:
            self._limit_s = limit_s
        if not self._limit_s:
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="bridge-cg-watchdog", daemon=True)
            self._thread.start()
        before, self._doing = self._doing, doing
        try:
            yield
        finally:
            self._doing = before

    def launched(self, replay: str) -> None:
        """Note that a replay with collectives was launched on the current stream."""
        event = self._make_event()
        event.record()
        self._launch = replay, event

    def check(self) -> None:
        """Report the last replay once if it timed out."""
        doing, now, launch = self._doing, self._clock(), self._launch
        passed_s, self._checked = now - self._checked, now
        if launch is self._seen:
            self._waited_s += min(passed_s, COUNTED * self.interval_s)
        else:
            self._seen, self._waited_s, self._settled = launch, 0.0, False
        if doing is not None and launch is not None and self._timed_out(launch[1]):
            self._settled = True
            self._end(
                f"{doing}: the {launch[0]} has not ended for {self._limit_s:.0f} s; another rank that "
                "shares these layers did not come to its reductions"
            )

    def _timed_out(self, event: torch.cuda.Event) -> bool:
        """Whether the launch has not ended within the limit; its event is queried once."""
        if self._settled or self._waited_s <= self._limit_s:
            return False
        try:
            self._settled = event.query()
        except RuntimeError:  # the device failed, which the training thread sees too
            self._settled = True
        return not self._settled

    def _watch(self) -> None:
        while True:
            time.sleep(self.interval_s)
            self.check()


def end_process(message: str) -> None:
    """Report a replay that hangs and end this process.

    Process groups are not aborted. The device would go on with what a broken reduction left, and an error handler of
    the user's could save that. It is written in a thread of its own: whoever holds a lock of the logger may be the one
    that waits for the device.
    """
    writing = threading.Thread(target=_report, args=(f"this rank ends in {message}",), daemon=True)
    writing.start()
    writing.join(REPORT_S)
    os._exit(TIMEOUT_STATUS)


def _report(message: str) -> None:
    """Write what every thread does, then the message."""
    faulthandler.dump_traceback(2, all_threads=True)  # to the file of stderr, whatever Python writes to
    warn(message)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


WATCHDOG = Watchdog(end_process)


def several_ranks() -> bool:
    """Whether this process is one of several of a job."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@functools.cache
def meet_ranks(limit_s: float) -> None:
    """Let all ranks find each other before the first step: without the plugin, one would join none of its collectives.

    Args:
        limit_s: The time-out of the run's process groups in seconds; half of it is waited, so that this is told first.

    Raises:
        OptionError: Some did not come.
    """
    store = distributed.distributed_c10d._get_default_store()
    keys = [f"bridge_cg/{number}" for number in range(distributed.get_world_size())]
    store.set(keys[distributed.get_rank()], "")
    try:
        store.wait(keys, timedelta(seconds=limit_s / 2))
    except RuntimeError:
        missing = [str(number) for number, key in enumerate(keys) if not store.check([key])]
        if missing:
            raise OptionError.because(
                PLUGIN,
                f"Cannot train on graphs: the plugin does not run in rank {', '.join(missing)}. Install it on every "
                f"machine, with {PLUGIN} unset.",
            ) from None
