"""A training process that is watched: its output goes to a log, its steps to the terminal with the time left."""

import os
import re
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.runs.recipe import error_in

_STEP = re.compile(r"\[compare\] step (\d+) of \d+")
_LAST_LINES = 200


def run_watched(
    command: Sequence[str],
    log: Path,
    limit: float,
    on_step: Callable[[int], None],
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a command to its end and return its error in one line, empty where there was none.

    Args:
        command: The command; it gets a process group of its own.
        log: File for its output.
        limit: Seconds after which the group is ended.
        on_step: Called with the number of each step that the output says is done.
        environment: Its environment variables; None for this process's.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env=environment,
    )
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, end)
    timer.start()
    last: list[str] = []
    try:
        with log.open("w") as file:
            for line in process.stdout or ():
                file.write(line)
                last = [*last[-_LAST_LINES:], line]
                step = _STEP.search(line)
                if step:
                    on_step(int(step[1]))
        status = process.wait()
    except BaseException:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        timer.cancel()
        process.wait()
    if late.is_set():
        return f"not finished after {limit:.0f} s (--time_limit)"
    if status == 0:
        return ""
    # The first line is the answer where none has an exception's name.
    said = f"the process ended with status {status}; its last line: {last[-1].strip() if last else ''}"
    return error_in("\n".join([said, *last]))


class TimeLeft:
    """Guesses how long all runs still take, from those that are done.

    Args:
        runs: How many there are.
        steps: Steps of each.
    """

    def __init__(self, runs: int, steps: int) -> None:
        self.runs, self.steps = runs, steps
        self.done: list[float] = []

    def seconds(self, elapsed: float, step: int) -> float | None:
        """Return the seconds left; None while nothing says.

        Args:
            elapsed: Seconds of the run that is under way.
            step: Its steps that are done.
        """
        if self.done:
            usual = statistics.median(self.done)
            return max(usual - elapsed, 0.0) + usual * (self.runs - len(self.done) - 1)
        if step < self.steps // 2:
            return None
        whole = elapsed * self.steps / step
        return whole - elapsed + whole * (self.runs - 1)


class Watch:
    """What the terminal shows while runs are made.

    Args:
        modes: Names of all runs, in order.
        steps: Steps of each.
    """

    def __init__(self, modes: Sequence[str], steps: int) -> None:
        self.modes, self.steps = modes, steps
        self.left = TimeLeft(len(modes), steps)
        self._progress: Any = None
        self._task: Any = None
        self._began = 0.0

    @contextmanager
    def run(self, mode: str) -> Iterator[None]:
        """Show a run for as long as it takes."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
        self._began = time.monotonic()
        with Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[left]}"), transient=True) as progress:
            place = f"{mode} ({self.modes.index(mode) + 1} of {len(self.modes)})"
            self._progress, self._task = progress, progress.add_task(place, total=self.steps, left="")
            self.step(0)
            yield
        self.left.done.append(time.monotonic() - self._began)

    def step(self, number: int) -> None:
        """Show that a step is done."""
        left = self.left.seconds(time.monotonic() - self._began, number)
        text = "" if left is None else f"about {left:.0f} s left in all"
        self._progress.update(self._task, completed=number, left=text)

    def finished(self, mode: str, record: dict[str, Any]) -> None:
        """Say in a line how a run ended."""
        took = self.left.done[-1]
        said = f"failed: {record['error']}" if "error" in record else f"{record['ms']:.1f} ms a step"
        count = f"{len(self.left.done)} of {len(self.modes)}"
        print(f"{mode}: {said} ({count}, {took:.0f} s)", flush=True)
