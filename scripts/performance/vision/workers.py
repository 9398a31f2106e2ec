"""Groups of modes measured in processes of their own, which take turns."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bridge_cg_plugin.cli.runs.ports import free_port
from bridge_cg_plugin.cli.runs.results import (
    COMMANDS,
    provenance,
    put_record,
    read_records,
)
from scripts.performance.models.workloads import description
from scripts.performance.vision.task import Task

GROUPS = (
    ("eager", "plugin", "plugin_te_attention", "plugin_fast", "plugin_streams", "plugin_flash", "plugin_flash_streams"),
    ("upstream",),
    ("compile",),
    ("compile_reduce_overhead",),
)
MODES = (*(mode for group in GROUPS for mode in group), "limit")
RESTARTS = 2
# Time in seconds for a worker to end by itself once its time is up.
GRACE = 5


def run_groups(groups: Sequence[tuple[str, ...]], task: Task) -> None:
    """Start a worker for each group and let them measure in turn."""
    deadline = time.monotonic() + task.seconds
    workers = [start_worker(group) for group in groups]
    try:
        for process in workers:
            wait_for_imports(process)
        for place, (process, group) in enumerate(zip(workers, groups, strict=True)):
            # The first group is the one that matters; the others share what it leaves.
            share = 1 if place == 0 else len(groups) - place
            seconds = max((deadline - time.monotonic()) / share, 0.0)
            run_group(process, dataclasses.replace(task, modes=group, seconds=seconds))
    finally:
        for process in workers:
            stop(process)


def start_worker(group: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process that imports and then waits for its task."""
    environment = {**os.environ, "MASTER_PORT": str(free_port())}
    if "upstream" in group:
        environment["BRIDGE_CG_PLUGIN"] = "0"
    return subprocess.Popen(
        [sys.executable, str(COMMANDS / "bench_vision.py"), "--worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,
    )


def wait_for_imports(process: subprocess.Popen[str]) -> None:
    """Wait for the line that says that a worker has imported."""
    assert process.stdout is not None
    process.stdout.readline()


def run_group(process: subprocess.Popen[str], task: Task) -> None:
    """Let a worker measure; where it dies, note the case that it died of and let another go on."""
    deadline = time.monotonic() + task.seconds
    if task.seconds <= 0:
        return note_missing(task, "not measured: the modes before used up the time; give more --seconds")
    for attempt in range(1 + RESTARTS):
        if attempt:
            process = start_worker(task.modes)
            wait_for_imports(process)
        status = hand_over(process, task)
        missing = missing_records(task)
        if not missing:
            return
        said = f"stopped after {task.seconds:.0f} s" if status is None else f"the process ended with status {status}"
        died_of = missing[0][0]
        note_missing(task, said, died_of)
        left = {name: grid for name, grid in task.grids.items() if name in {case for case, _ in missing} - {died_of}}
        task = dataclasses.replace(task, grids=left, seconds=max(deadline - time.monotonic(), 0.0))
        if status is None or not left:
            break
    note_missing(task, "not tried: " + said)


def hand_over(process: subprocess.Popen[str], task: Task) -> int | None:
    """Hand a worker its task and wait; returns its status, None if it had to be stopped."""
    try:
        process.communicate(json.dumps(dataclasses.asdict(task)) + "\n", timeout=task.seconds + GRACE)
    except subprocess.TimeoutExpired:
        return None
    finally:
        stop(process)
    return process.returncode


def stop(process: subprocess.Popen[str]) -> None:
    """End a worker, and what it started, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def missing_records(task: Task) -> list[tuple[str, str]]:
    """Return the cases and modes of a task that have no record, in the order in which they are measured."""
    there = {(r["case"], r["mode"]) for r in read_records(Path(task.out))}
    return [(name, mode) for name in task.grids for mode in task.modes if (name, mode) not in there]


def note_missing(task: Task, error: str, case: str | None = None) -> None:
    """Write a record with the error for what has none, of one case or of all."""
    for name, mode in missing_records(task):
        if case in (None, name):
            put_record(
                Path(task.out), {**description(name, mode, task.grids[name]), "error": error, **provenance(0, 0)}
            )


def worker() -> int:
    """Import, say so, wait for a task, measure it; returns the status."""
    # Nothing that modules print may reach the parent: it reads one line.
    channel, sys.stdout = sys.stdout, sys.stderr
    from scripts.performance.vision.group import measure_group

    print("ready", file=channel, flush=True)
    line = sys.stdin.readline()
    return measure_group(Task(**json.loads(line))) if line else 0
