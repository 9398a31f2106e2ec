"""Reports a replay that timed out, raises an error in the main thread, then ends the process."""

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

# Exit status of a process that is ended here, the same as that of the `timeout` command.
TIMEOUT_STATUS = 124
# Seconds that training has for its own clean-up.
GRACE_S = 30.0
STDERR = 2


@dataclass(frozen=True, slots=True)
class ReplayTimeout:
    """A replay that has not ended in time.

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


class ReplayTimeoutError(RuntimeError):
    """A replay has not ended within the time-out; raised in the main thread."""


def end_process(timeout: ReplayTimeout, grace_s: float = GRACE_S) -> None:
    """Report the timeout and end this process, unless the user wants to keep it.

    Process groups are not aborted. The device would go on with what a broken reduction left, and an error handler of
    the user's could save that.

    Args:
        timeout: What has not ended.
        grace_s: Seconds until a process that does not end by itself is ended.
    """
    if watchdog_minutes() == 0:
        _in_thread(lambda: _report(f"this rank waits in {timeout}. {WATCHDOG_MINUTES}=0 keeps the process"))
        return
    _kill_after(2 * grace_s)
    _in_thread(lambda: _end_in_order(timeout))
    time.sleep(grace_s)
    os._exit(TIMEOUT_STATUS)


def warn_in_thread(message: str) -> None:
    """Log a warning without waiting until it is written."""
    _in_thread(lambda: warn(message))


def _in_thread(work: Callable[[], None]) -> None:
    """Run work in a thread of its own: whoever holds a lock of the logger may be the one that waits for the device."""
    threading.Thread(target=work, name="bridge-cg-watchdog-report", daemon=True).start()


def _kill_after(seconds: float) -> None:
    """Let the system end this process: no thread of Python runs while the interpreter shuts down."""
    ctypes.CDLL(None).signal(signal.SIGALRM, None)  # the default, whatever handler there was
    signal.alarm(math.ceil(seconds))


def _end_in_order(timeout: ReplayTimeout) -> None:
    _report(f"this rank ends in {timeout}")
    _raise_in_main(type(ReplayTimeoutError.__name__, (ReplayTimeoutError,), {"__str__": lambda self: str(timeout)}))


def _report(message: str) -> None:
    """Write what every thread does, then the message."""
    faulthandler.dump_traceback(STDERR, all_threads=True)
    warn(message)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _raise_in_main(error: type[ReplayTimeoutError]) -> None:
    """Raise an error in the main thread at its next step of Python; one that waits in C has none."""
    identity = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(error))
