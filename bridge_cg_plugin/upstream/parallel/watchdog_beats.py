"""Starts the process that warns for a rank whose watchdog does not run, or ends it, and tells it that it does."""

import atexit
import faulthandler
import fcntl
import math
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

from ...announce import rank, warn
from ..environment import watchdog_minutes
from .watchdog_exit import GRACE_S, STDERR, warn_in_thread

SCRIPT = Path(__file__).with_name("watchdog_process.py")
# Real-time signals, of which the last is the least likely to be somebody's.
SIGNALS = range(signal.SIGRTMAX, signal.SIGRTMIN - 1, -1)
ALONE = (
    "this rank trains without the process that ends it, or warns, where it waits for another rank and no Python runs: "
)


class Beats:
    """Lines to the supervising process, which warns if they stop, and may end this one. A fork of this one sends none.

    Args:
        margin_s: Seconds after a replay's limit until that process ends this one: the watchdog comes before it.
    """

    def __init__(self, margin_s: float = 2 * GRACE_S) -> None:
        self._margin_s = margin_s
        self._asked = False
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process at the first call; without it training goes on.

        Where the user wants to keep this one, the other only warns.
        """
        if self._asked:
            return
        self._asked = True
        if watchdog_minutes() == 0:
            self._margin_s = math.inf
        try:
            self._start()
        except OSError as error:
            warn(f"{ALONE}{error}")

    def send(self, doing: str, replay: str, replay_limit_s: float, limit_s: float) -> None:
        """Tell that Python runs; what finds no room is dropped.

        Args:
            doing: What this rank is doing; empty where that is nothing to watch.
            replay: The last replay that is not known to have ended; empty without one.
            replay_limit_s: Seconds that a replay may take.
            limit_s: The time-out of the run's process groups in seconds.
        """
        link = self._link
        if link is None:
            return
        line = f"{replay_limit_s + self._margin_s}\t{limit_s}\t{doing}\t{replay}"
        try:
            link.send(line.encode(), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            pass
        except OSError:  # that process has ended
            self.stop()
            self._name_failure()

    def stop(self) -> None:
        """End the process."""
        link, self._link = self._link, None
        if link is not None and self._process is not None:
            link.close()
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        SCRIPT.stat()
        ours, its = map(_above_stderr, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        ours.setblocking(False)
        with its:
            words = [str(SCRIPT), str(os.getpid()), str(rank()), str(_write_stacks_on_signal())]
            try:
                self._process = subprocess.Popen(
                    [sys.executable or "python3", "-I", "-S", *words],
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        self._link = ours
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def _name_failure(self) -> None:
        """Warn if the process has ended by itself: it never ran, or failed."""
        process = self._process
        if process is not None and (process.returncode or 0) > 0:
            warn_in_thread(f"{ALONE}{process.args!r} ended with status {process.returncode}")

    def _leave_to_parent(self) -> None:
        """Forget the process in a fork, where it is no child."""
        link, self._link = self._link, None
        if link is not None and self._process is not None:
            link.close()
            self._process.poll()


def _above_stderr(end: socket.socket) -> socket.socket:
    """Return a socket at a descriptor that nobody writes to: closed standard streams leave theirs to the next."""
    with end:
        return socket.socket(fileno=fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, STDERR + 1))


def _write_stacks_on_signal() -> int:
    """Let an unused signal write the stacks of all threads, which needs no lock; returns it, 0 where there is none."""
    status = Path("/proc/self/status").read_text()
    used = 0
    for mask in re.findall(r"^Sig(?:Blk|Ign|Cgt):\s*(\w+)$", status, re.MULTILINE):
        used |= int(mask, 16)
    number = next((number for number in SIGNALS if not used >> (number - 1) & 1), 0)
    if number:
        faulthandler.register(number, file=STDERR, all_threads=True, chain=False)
    return number
