"""How long a recording of the vision tower takes: the first of a process, later ones, and those of the next model."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.runs.results import ROOT, provenance
from scripts.performance.models.workloads import one_image
from scripts.performance.vision.sizes import run_all

# Whether Triton's compiled kernels are in its cache when the process starts.
MODES = ("cold", "warm")
# Times that what may come again in a process is measured.
REPEATS = 3


def measure(small: int, large: int) -> Iterator[dict[str, Any]]:
    """Measure in two processes, the second with the compiled kernels of the first; yields their records.

    Args:
        small: Tokens of an image.
        large: Tokens of another one.

    Raises:
        RuntimeError: A process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            out = Path(folder, f"{mode}.json")
            child = [sys.executable, "-m", __name__, str(out), str(small), str(large)]
            environment = {**os.environ, "TRITON_CACHE_DIR": str(Path(folder, "triton"))}
            done = subprocess.run(child, env=environment, stdout=sys.stderr, cwd=ROOT)
            if done.returncode:
                raise RuntimeError(f"{mode}: the process ended with status {done.returncode}")
            for record in json.loads(out.read_text()):
                yield {**provenance(record["repeats"], 0), **record, "mode": mode}


def captures(small: int, large: int) -> list[dict[str, Any]]:
    """Record both sizes for several models in this process; returns what a recording took and how exact it is.

    The first one comes once, others `REPEATS` times: their median, and the largest difference.
    """
    from scripts.performance.models import tower

    tower.start_process()
    model = tower.build_tower()
    grads = tower.MainGrads(model)
    batches = {tokens: tower.make_batch(one_image(tokens), model) for tokens in (small, large)}
    expected = {tokens: run_all(model, [batch], grads)[1] for tokens, batch in batches.items()}
    ascending, descending = [batches[small], batches[large]], [batches[large], batches[small]]
    found = []
    for repeat in range(REPEATS):
        first, later = _of_one_model("first", model, grads, ascending, expected)
        found += [later] if repeat else [first, later]
        found += _of_one_model("next_model", model, grads, descending, expected)
    return _by_case(found)


def _by_case(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one record of each case, in the order in which they first came."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        cases.setdefault(record["case"], []).append(record)
    return [
        {
            **same[0],
            "ms": statistics.median(each["ms"] for each in same),
            "grad_rel": max(each["grad_rel"] for each in same),
            "replays": sum(each["replays"] for each in same),
            "repeats": len(same),
        }
        for same in cases.values()
    ]


def _of_one_model(
    name: str, model: Any, grads: Any, batches: Sequence[Any], expected: dict[int, list[Any]]
) -> list[dict[str, Any]]:
    """Record the first size after a warm-up step with it, the second one before the step after that which asks."""
    from bridge_cg_plugin.options import VisionGraphOptions
    from bridge_cg_plugin.upstream.hooks.helpers.vision_helper import VisionTECudaGraphHelper
    from scripts.performance.models import tower

    buckets = tuple(sorted(batch.tokens for batch in batches))
    options = VisionGraphOptions(
        impl="transformer_engine",
        buckets=buckets,
        capture_mode="on_demand",
        slots=1,
        evaluation=False,
        strict=True,
        cost_fallback=False,
    )
    helper = VisionTECudaGraphHelper(model, model.config, options=options)
    tower.step(model, batches[0])
    seconds = [seconds_of(helper.create_cudagraphs)]
    graphs = helper.graphs
    assert graphs is not None
    with graphs.step():
        tower.step(model, batches[1])
    seconds.append(seconds_of(graphs.begin_step))
    records = []
    for case, batch, took in zip((name, "later"), batches, seconds, strict=True):
        before = graphs.statistics().replays
        gradients = run_all(model, [batch], grads, graphs)[1]
        replays = graphs.statistics().replays - before
        rel = tower.largest_relative(gradients, expected[batch.tokens])
        found = {"ms": took * 1e3, "grad_rel": rel, "replays": replays}
        records.append({"case": f"{case}_{batch.tokens}", "tokens": batch.tokens, **found})
    helper.delete_cuda_graphs()
    return records


def seconds_of(work: Callable[[], None]) -> float:
    """Return how long training waits for some work: from the end of all before it, compilers in other threads too."""
    from scripts.performance.measuring import measure

    measure.synchronize()
    began = time.perf_counter()
    work()
    measure.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(captures(int(sys.argv[2]), int(sys.argv[3]))))
