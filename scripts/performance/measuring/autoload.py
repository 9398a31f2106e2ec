"""What the plugin adds to a process that imports PyTorch and never Bridge."""

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from bridge_cg_plugin.cli.runs.results import ROOT, provenance

CHILD = """
import json, os, sys, time
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
began, cpu = time.perf_counter(), time.process_time()
torch._import_device_backends()  # what `import torch` ends with
wall, cpu = time.perf_counter() - began, time.process_time() - cpu
assert not any(name.split(".")[0] in ("megatron", "transformer_engine") for name in sys.modules)
import bridge_cg_plugin
assert bridge_cg_plugin.status()["active"] == {on}
print(json.dumps([wall * 1e3, cpu * 1e3]))
"""
MODES = ("off", "on")


def one_process(mode: str) -> dict[str, float]:
    """Run a process; returns milliseconds: of the process, of loading plugins, and that step's CPU time.

    Raises:
        RuntimeError: It imported upstream, the switch did not work, or it printed something else.
    """
    environment = {**os.environ, "BRIDGE_CG_PLUGIN": str(MODES.index(mode)), "PYTHONWARNINGS": "ignore"}
    child = [sys.executable, "-c", CHILD.format(on=mode == "on")]
    began = time.perf_counter()
    done = subprocess.run(child, env=environment, capture_output=True, text=True, cwd=ROOT)
    ms = (time.perf_counter() - began) * 1e3
    if done.returncode or len(done.stdout.splitlines()) != 1 or done.stderr:
        raise RuntimeError(f"{mode}: status {done.returncode}: {done.stdout}{done.stderr}")
    load_ms, load_cpu_ms = json.loads(done.stdout)
    return {"ms": ms, "load_ms": load_ms, "load_cpu_ms": load_cpu_ms}


def measure(repeats: int) -> dict[str, list[dict[str, float]]]:
    """Run both modes in turn, each first in every other round."""
    one_process("on")
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for round_number in range(repeats):
        for mode in MODES if round_number % 2 else reversed(MODES):
            found[mode].append(one_process(mode))
    return found


def records(found: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return one record of medians for each mode; `added_ms` is what the step takes longer with the plugin."""
    made = []
    for mode, runs in found.items():
        medians = {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
        made.append({"case": "import_torch", "mode": mode, **medians, **provenance(len(runs), 0)})
    off, on = made
    on["added_ms"] = round(on["load_ms"] - off["load_ms"], 2)
    return made
