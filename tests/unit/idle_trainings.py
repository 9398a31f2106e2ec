"""Training processes that train nothing, for tests of what bench_parallel.py runs and records."""

import threading
import time

from scripts.performance.layouts import bench as layouts_bench
from scripts.performance.processes import TrainingFailed


def idle_trainings(monkeypatch):
    """Replace training processes; returns the list of (mode, words, devices, cores), after who fails."""
    asked, lock, busy = [], threading.Lock(), set()
    failing = []

    class Process:
        def __init__(self, log, ranks, devices):
            assert len(set(devices)) == len(devices) <= ranks
            self._ranks, self._devices = range(ranks), devices

        def wait_until_ready(self):
            pass

        def keep_to(self, cores):
            assert len(cores) == len(self._ranks)
            self._cores = cores

        def train(self, mode, words, limit_s=None):
            with lock:
                assert not busy & set(self._devices), "another run has the GPU"
                busy.update(self._devices)
                asked.append((mode, tuple(words), self._devices, self._cores))
            time.sleep(0.02)
            with lock:
                busy.difference_update(self._devices)
            if "--tensor-parallel" in words and "TP2" in failing:
                raise TrainingFailed("process 1 of 2 ended with status 1: no", "RuntimeError: out of memory")
            steps = int(words[words.index("--steps") + 1])
            samples = int(words[words.index("--global-batch") + 1])
            grown = samples if "grow" in failing else 0
            graphs = {"replays": samples, "fallbacks": {}, "memory_bytes": 2**30 + grown * 2**22}
            graphs = graphs if mode == "graphs" else None
            ranks = [{"rank": i, "peak_gb": 1.0 + i, "step_ms": [], "graphs": graphs} for i in self._ranks]
            for rank in ranks if mode == "graphs" else ():
                moved = any(word.startswith("vision_cuda_graph_balance") for word in words)
                rank["step_tokens"] = [0, *[10 if moved else 10 * (rank["rank"] + 1)] * (steps - 1)]
            ms = 5.0 if len(self._devices) == 1 else 8.0 if mode == "eager" else 6.25
            step_ms = [99.0] * (steps - 2) + [ms - 0.5, ms + 0.5]
            run = {"losses": [2.0] * steps, "grad_norms": [1.0] * steps, "step_ms": step_ms}
            return {**run, "peak_gb": 2.0, "graphs": graphs, "ranks": ranks}

        def close(self):
            pass

    monkeypatch.setattr(layouts_bench, "TrainingProcess", Process)
    asked.append(failing)
    return asked
