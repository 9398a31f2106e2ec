"""Warns for a rank whose watchdog does not run, and ends it: a script that needs the standard library only.

Some calls that wait for the device keep the interpreter's lock (GIL), so no thread of Python runs, the watchdog's
neither. The rank sends lines for as long as it runs; this process counts for how long none came. It ends a rank only
for a replay: where a rank waits in any other collective, NCCL's watchdog ends it.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

STDIN, STDERR = 0, 2
# Part of the groups' time-out after which a rank is said to be slow, before NCCL ends it.
WARN_AFTER = 0.5
# Seconds between two checks; with a short limit, the limit over the number of checks.
CHECK_S, CHECKS = 5.0, 40
# At most so many intervals count between two checks: for the rest of the time this process did not run.
COUNTED = 2
# Seconds that the rank has to write its stacks, and whoever reads standard error to make room.
STACKS_S = ROOM_S = 1.0
LONGEST_LINE = 4096


def slow(doing: str, seconds: float, timeout_s: float) -> str:
    """Return the warning of a rank that may be waiting for another one."""
    return (
        f"this rank has been in {doing} for {seconds:.0f} s; if it waits for another rank, it ends once a collective "
        f"has waited for {timeout_s:.0f} s"
    )


def interval_between_checks(*limits_s: float) -> float:
    """Return seconds between two checks, in proportion to the limits that are checked."""
    return min(CHECK_S, *(limit / CHECKS for limit in limits_s))


class Silence:
    """How long a rank has sent no line while it may wait for another rank.

    Args:
        clock: Seconds.

    Attributes:
        doing: What the rank does; empty where it is in no step.
        replay: The last replay that it told of; empty where all are known to have ended.
        limit_s: Seconds of silence after which it is ended.
        timeout_s: The time-out of its process groups.
        seconds: The silence so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.doing = self.replay = ""
        self.limit_s = self.timeout_s = self.seconds = 0.0
        self._clock, self._began = clock, 0.0
        self._warned = False

    @property
    def interval_s(self) -> float:
        """Seconds between two checks."""
        return interval_between_checks(self.limit_s, self.timeout_s) or CHECK_S

    @property
    def long(self) -> bool:
        """Whether the rank is to be warned for, which it could not do itself."""
        return bool(self.doing) and not self._warned and self.seconds > WARN_AFTER * self.timeout_s

    @property
    def over(self) -> bool:
        """Whether the rank has been silent for too long."""
        return bool(self.doing and self.replay) and self.seconds > self.limit_s

    def heard(self, line: str) -> None:
        """Begin anew with what a line tells."""
        limit, timeout, doing, self.replay = line.split("\t")
        self.limit_s, self.timeout_s, self.seconds = float(limit), float(timeout), 0.0
        if doing != self.doing:
            self.doing, self._began, self._warned = doing, self._clock(), False

    def warning(self) -> str:
        """Return what the rank would warn of; once for each thing that it does."""
        self._warned = True
        return slow(self.doing, self._clock() - self._began, self.timeout_s)

    def count(self, passed_s: float, stopped: bool) -> None:
        """Add the time since the last check, unless the rank was stopped."""
        if not stopped:
            self.seconds += min(passed_s, COUNTED * self.interval_s)

    def __str__(self) -> str:
        return (
            f"{self.doing}: its watchdog has not run for {self.limit_s:.0f} s while the {self.replay}, or a later one, "
            "may wait for another rank; probably a call that waits for the device keeps the interpreter's lock (GIL)"
        )


def supervise(process: int, rank: int, stacks: int) -> None:
    """Watch the parent until it ends; warn for it if it is silent for long, and end it if that is too long.

    Args:
        process: The parent.
        rank: Its number, for the message.
        stacks: The signal that makes it write its stacks; 0 is none.
    """
    silence, checked = Silence(), time.monotonic()
    while os.getppid() == process:
        line = _line_within(silence.interval_s)
        if line is None:
            silence.count(time.monotonic() - checked, is_stopped(process))
        elif line:
            silence.heard(line)
        else:
            return
        checked = time.monotonic()
        if silence.over:
            _end_if_silent(process, f"[rank {rank}] this rank ends in {silence}\n", stacks, silence)
        elif silence.long:
            _write(f"[rank {rank}] {silence.warning()}\n")


def is_stopped(process: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


def _line_within(seconds: float) -> str | None:
    """Return the next line, empty where none can come any more; None if the time passes without one."""
    if not select.select([STDIN], [], [], seconds)[0]:
        return None
    try:
        return os.read(STDIN, LONGEST_LINE).decode()
    except ConnectionError:
        return ""


def _end_if_silent(process: int, message: str, stacks: int, silence: Silence) -> None:
    """Let the rank write its stacks, then end it unless it is heard again."""
    _signal(process, stacks)
    line = _line_within(STACKS_S)
    if line:
        silence.heard(line)
    elif line is None:
        _write(message)
        _signal(process, signal.SIGKILL)
        sys.exit()


def _write(message: str) -> None:
    """Write to standard error; where nobody reads it and it is full, to nobody."""
    with suppress(OSError):
        if select.select([], [STDERR], [], ROOM_S)[1]:
            os.write(STDERR, message.encode())


def _signal(process: int, number: int) -> None:
    """Send the parent a signal: its number is its own for as long as it is the parent."""
    if os.getppid() == process:
        with suppress(OSError):
            os.kill(process, number)


if __name__ == "__main__":
    # Schedulers send ranks' signals to all processes of a job; this one ends with its rank.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    supervise(*(int(word) for word in sys.argv[1:]))
