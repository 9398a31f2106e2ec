"""What is done about a replay that waits for ever: a report of every thread, an orderly end, then any end."""

import ctypes
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...announce import warn
from ..environment import WATCHDOG_MINUTES, watchdog_minutes

# Exit status of a process that was ended here, the one by which `timeout` reports a time-out.
STALLED = 124
# Seconds that training has for its own clean-up.
GRACE_S = 30.0
STDERR = 2


@dataclass(frozen=True, slots=True)
class Stall:
    """A replay that waits for another rank.

    Attributes:
        doing: What the rank was doing.
        replay: What was replayed.
        limit_s: Seconds that it has not ended for.
    """

    doing: str
    replay: str
    limit_s: float

    def __str__(self) -> str:
        return (
            f"{self.doing}: the {self.replay} has not ended for {self.limit_s:.0f} s; another rank that shares these "
            "layers did not come to its reductions"
        )


class StallError(RuntimeError):
    """A replay has not ended within the time-out; raised in the main thread."""


def act(stall: Stall, grace_s: float = GRACE_S) -> None:
    """End this process, or only report the stall where the user wants to keep the process.

    Process groups are not aborted. The device would go on with what a broken reduction left, and an error handler of
    the user's could save that.

    Args:
        stall: What waits.
        grace_s: Seconds until a process that does not end by itself is ended.
    """
    if watchdog_minutes() == 0:
        _beside(lambda: _report(f"this rank waits in {stall}. {WATCHDOG_MINUTES}=0 keeps the process"))
        return
    _kill_after(2 * grace_s)
    _beside(lambda: _end_in_order(stall))
    time.sleep(grace_s)
    os._exit(STALLED)


def warn_beside(message: str) -> None:
    """Log a warning without waiting until it is written."""
    _beside(lambda: warn(message))


def _beside(work: Callable[[], None]) -> None:
    """Run work in a thread of its own: whoever holds a lock of the logger may be the one that waits for the device."""
    threading.Thread(target=work, name="bridge-cg-stall-report", daemon=True).start()


def _kill_after(seconds: float) -> None:
    """Let the system end this process: no thread of Python runs while the interpreter shuts down."""
    ctypes.CDLL(None).signal(signal.SIGALRM, None)  # the default, whatever handler there was
    signal.alarm(math.ceil(seconds))


def _end_in_order(stall: Stall) -> None:
    _report(f"this rank ends in {stall}")
    _raise_in_main(type(StallError.__name__, (StallError,), {"__str__": lambda self: str(stall)}))


def _report(message: str) -> None:
    """Write what every thread does, then the message."""
    faulthandler.dump_traceback(STDERR, all_threads=True)
    warn(message)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _raise_in_main(error: type[StallError]) -> None:
    """Raise an error in the main thread at its next step of Python; one that waits in C has none."""
    identity = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(error))
