"""What the plugin adds to a process that imports PyTorch and never Bridge: whole processes, on and off in turn.

    python -m scripts.performance.bench_autoload [--repeats 60] [--out docs/benchmarks/autoload.jsonl]

Each process imports torch and ends. The switch is BRIDGE_CG_PLUGIN; nothing else differs. A process's CPU time varies
far less than its wall time where other work shares the machine. The difference is the median over neighbouring pairs.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from .results import ROOT, provenance, write_records

CHILD = """
import torch, sys
assert not any(name.split(".")[0] in ("megatron", "transformer_engine") for name in sys.modules)
assert ("wrapt" in sys.modules) == {on}
"""
MODES = ("off", "on")


def one_process(mode: str) -> tuple[float, float]:
    """Run a process; returns its wall time and its CPU time in milliseconds.

    Raises:
        RuntimeError: It imported upstream, the switch did not work, or it printed something.
    """
    environment = {**os.environ, "BRIDGE_CG_PLUGIN": str(MODES.index(mode)), "PYTHONWARNINGS": "ignore"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    child = [sys.executable, "-c", CHILD.format(on=mode == "on")]
    done = subprocess.run(child, env=environment, capture_output=True, text=True, cwd=ROOT)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode or done.stdout or done.stderr:
        raise RuntimeError(f"{mode}: status {done.returncode}: {done.stdout}{done.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall * 1e3, cpu * 1e3


def measure(repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Run both modes in turn, each first in every other round."""
    one_process("on")
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for round_number in range(repeats):
        for mode in MODES if round_number % 2 else reversed(MODES):
            found[mode].append(one_process(mode))
    return found


def records(found: dict[str, list[tuple[float, float]]]) -> list[dict]:
    """Return one record for each mode; `added_ms` and `added_cpu_ms` are medians over neighbouring pairs."""
    pairs = list(zip(found["on"], found["off"], strict=True))
    wall, cpu = (statistics.median(on[i] - off[i] for on, off in pairs) for i in range(2))
    made = []
    for mode in MODES:
        ms, cpu_ms = (statistics.median(run[i] for run in found[mode]) for i in range(2))
        record = {"case": "import_torch", "mode": mode, "ms": round(ms, 2), "cpu_ms": round(cpu_ms, 2)}
        if mode == "on":
            record |= {"added_ms": round(wall, 2), "added_cpu_ms": round(cpu, 2)}
        made.append({**record, **provenance(len(pairs), 0)})
    return made


def main() -> int:
    """Measure, print and write the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / "autoload.jsonl")
    args = parser.parse_args()
    made = records(measure(args.repeats))
    write_records(args.out, made)
    for record in made:
        print({key: record[key] for key in ("mode", "ms", "cpu_ms", "added_ms", "added_cpu_ms") if key in record})
    return 0


if __name__ == "__main__":
    sys.exit(main())
