"""Times of the vision tower, forward plus backward: eager, the plugin, upstream's graphs, torch.compile, the limit.

    python scripts/performance/bench_vision.py
    python scripts/performance/bench_vision.py --tokens "" --seconds 90
    python scripts/performance/bench_vision.py --modes eager,plugin --cases 1x448,8mix --tokens 1024,4096

Modes of one group run in one process on the same weights and inputs, one case after another, beside an eager baseline;
each group has a process of its own, as a failed capture or a compilation must not reach another's figures. All
processes start at once and import; they measure in turn. A record is written as soon as it is measured and replaces an
older one of its case and mode. What cannot be measured, for lack of memory, time or support, has a record with the
error.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.photographs.processes import free_port  # noqa: E402
from scripts.performance.results import (  # noqa: E402
    output_path,
    provenance,
    put_record,
    read_records,
    write_records,
)
from scripts.performance.workloads import CASES, SWEEP, Grid, description, workloads  # noqa: E402

GROUPS = (
    ("eager", "plugin", "plugin_te_attention", "plugin_fast", "plugin_streams", "plugin_flash", "plugin_flash_streams"),
    ("upstream",),
    ("compile",),
    ("compile_reduce_overhead",),
)
MODES = (*(mode for group in GROUPS for mode in group), "limit")
RESTARTS = 2
WIDTHS, DIGITS = (7, 5, 6, 7, 7), (1, 2, 2, 1, 0)
# Time in seconds for a worker to end by itself once its time is up.
GRACE = 5


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker measures.

    Attributes:
        modes: Of one group.
        grids: Cases by name.
        out: The records' file.
        repeats: Timed runs of each measurement.
        case_seconds: When no further repeat of a measurement begins.
        seconds: For all of it.
    """

    modes: tuple[str, ...]
    grids: dict[str, Grid]
    out: str
    repeats: int
    case_seconds: float
    seconds: float


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/vision_bench.jsonl on a GPU")
    parser.add_argument("--modes", default=",".join(MODES), help=f"comma-separated; all: {', '.join(MODES)}")
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated; all: {', '.join(CASES)}")
    parser.add_argument("--tokens", default=",".join(map(str, SWEEP)), help="single images of so many patches")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each measurement, at least 3")
    parser.add_argument("--case-seconds", type=float, default=1.0, help="no further repeat begins after this long")
    parser.add_argument("--seconds", type=float, default=200.0, help="time for all, shared by the processes in turn")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def split(text: str) -> list[str]:
    """Return the parts of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the records."""
    args = parse(arguments)
    if args.worker:
        return worker()
    try:
        modes, grids, out = checked(args)
    except ValueError as error:
        print(f"bench_vision.py: {error}", file=sys.stderr)
        return 2
    drop_records(out, grids, modes)
    if "limit" in modes:
        write_limits(out, grids)
    groups = [tuple(mode for mode in group if mode in modes) for group in GROUPS]
    task = Task((), grids, str(out), args.repeats, args.case_seconds, args.seconds)
    run_groups([group for group in groups if group], task)
    print_table(read_records(out), grids)
    return 0


def drop_records(out: Path, grids: dict[str, Grid], modes: Sequence[str]) -> None:
    """Drop the records that this run is about to write."""
    asked = {(name, mode) for name in grids for mode in modes}
    write_records(out, [r for r in read_records(out) if (r["case"], r["mode"]) not in asked])


def print_table(records: Sequence[dict[str, Any]], grids: dict[str, Grid]) -> None:
    """Print the records of the cases."""
    print(
        f"{'case':13} {'mode':23} {'tokens':>6} {'ms':>7} {'ratio':>5} {'host':>6} {'busy':>7} {'kernels':>7}  parity"
    )
    for r in sorted((r for r in records if r["case"] in grids), key=lambda r: list(grids).index(r["case"])):
        head = f"{r['case']:13} {r['mode']:23} {r['tokens']:>6}"
        if "error" in r:
            print(f"{head} {r['error']}")
            continue
        numbers = [r["ms"], r.get("ratio"), r.get("host_ms"), r.get("gpu_busy_ms"), r.get("kernels")]
        cells = [" " * w if n is None else f"{n:>{w}.{d}f}" for n, w, d in zip(numbers, WIDTHS, DIGITS, strict=True)]
        parity = f"outputs {r['forward_rel']:.0e}, gradients {r['grad_rel']:.1e}" if "forward_rel" in r else ""
        print(f"{head} {' '.join(cells)}  {parity}")


def checked(args: argparse.Namespace) -> tuple[list[str], dict[str, Grid], Path]:
    """Return modes, cases and file.

    Raises:
        ValueError: A name is unknown, a number is no power of two, or a file is needed.
    """
    modes = split(args.modes)
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise ValueError(f"--modes {unknown[0]}: allowed is any of {', '.join(MODES)}; correct the name")
    try:
        tokens = [int(part) for part in split(args.tokens)]
    except ValueError:
        raise ValueError(f"--tokens {args.tokens}: allowed are numbers, comma-separated; correct the list") from None
    grids = workloads(split(args.cases), tokens)
    if not grids:
        raise ValueError("--cases and --tokens are both empty: there is nothing to measure; name at least one")
    return modes, grids, output_path(args.out, "vision_bench.jsonl")


# The parent: processes in turn.


def run_groups(groups: Sequence[tuple[str, ...]], task: Task) -> None:
    """Start a worker for each group and let them measure in turn."""
    deadline = time.monotonic() + task.seconds
    workers = [start_worker(group) for group in groups]
    try:
        for process in workers:
            process.stdout.readline()  # it has imported
        for place, (process, group) in enumerate(zip(workers, groups, strict=True)):
            # The first group is the one that matters; the others share what it leaves.
            share = 1 if place == 0 else len(groups) - place
            seconds = max((deadline - time.monotonic()) / share, 0.0)
            run_group(process, dataclasses.replace(task, modes=group, seconds=seconds))
    finally:
        for process in workers:
            stop(process)


def start_worker(group: Sequence[str]) -> subprocess.Popen:
    """Start a process that imports and then waits for its task."""
    environment = {**os.environ, "MASTER_PORT": str(free_port())}
    if "upstream" in group:
        environment["BRIDGE_CG_PLUGIN"] = "0"
    return subprocess.Popen(
        [sys.executable, __file__, "--worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,
    )


def run_group(process: subprocess.Popen, task: Task) -> None:
    """Let a worker measure; where it dies, note the case that it died of and let another go on."""
    deadline = time.monotonic() + task.seconds
    if task.seconds <= 0:
        return note_missing(task, "not measured: the modes before used up the time; give more --seconds")
    for attempt in range(1 + RESTARTS):
        if attempt:
            process = start_worker(task.modes)
            process.stdout.readline()
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


def hand_over(process: subprocess.Popen, task: Task) -> int | None:
    """Hand a worker its task and wait; returns its status, None if it had to be stopped."""
    try:
        process.communicate(json.dumps(dataclasses.asdict(task)) + "\n", timeout=task.seconds + GRACE)
    except subprocess.TimeoutExpired:
        return None
    finally:
        stop(process)
    return process.returncode


def stop(process: subprocess.Popen) -> None:
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


def write_limits(out: Path, grids: dict[str, Grid]) -> None:
    """Write what arithmetic alone takes."""
    from scripts.performance.arithmetic import limit_ms, step_flops

    for name, grid in grids.items():
        fields = {"ms": limit_ms(grid), "tflop": step_flops(grid) / 1e12, **provenance(0, 0)}
        put_record(out, {**description(name, "limit", grid), **fields})


# A worker: one group in one process.


def worker() -> int:
    """Import, say so, wait for a task, measure it; returns the status."""
    # Nothing that modules print may reach the parent: it reads one line.
    channel, sys.stdout = sys.stdout, sys.stderr
    from scripts.performance.group import measure_group

    print("ready", file=channel, flush=True)
    line = sys.stdin.readline()
    return measure_group(Task(**json.loads(line))) if line else 0


if __name__ == "__main__":
    sys.exit(main())
