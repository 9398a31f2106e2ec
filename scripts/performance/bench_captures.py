"""How long one recording of the vision tower takes, in processes without and with compiled kernels in Triton's cache.

    python scripts/performance/bench_captures.py

Each process warms up with the small image, records its bucket (first), and records the large image's bucket when a step
asks for it (later). It does the same for another model's graphs the other way round (next_model, later). What may come
again is measured three times in each process, and the median is kept. Every recording's gradients are compared with
eager's. Records go to docs/benchmarks/vision_captures.jsonl.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import provenance
from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.hooks.helpers.vision_helper import VisionTECudaGraphHelper
from scripts.performance.measure import synchronize
from scripts.performance.records import output_path, put_record
from tests.models import tower
from tests.models.workloads import one_image

# Whether Triton's compiled kernels are in its cache when the process starts.
MODES = ("cold", "warm")
# Times that what may come again in a process is measured.
REPEATS = 3

Record = dict[str, Any]


def measure(small: int, large: int) -> Iterator[Record]:
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
            child = [sys.executable, __file__, "--part", str(out), "--small", str(small), "--large", str(large)]
            environment = {**os.environ, "TRITON_CACHE_DIR": str(Path(folder, "triton"))}
            done = subprocess.run(child, env=environment, stdout=sys.stderr, cwd=ROOT)
            if done.returncode:
                raise RuntimeError(f"{mode}: the process ended with status {done.returncode}")
            for record in json.loads(out.read_text()):
                yield {**provenance(record["repeats"], 0), **record, "mode": mode}


def captures(small: int, large: int) -> list[Record]:
    """Record both sizes for several models in this process; returns what a recording took and how exact it is.

    The first one comes once, others `REPEATS` times: their median, and the largest difference.
    """
    tower.start_process()
    model = tower.build_tower()
    grads = tower.MainGrads(model)
    batches = {tokens: tower.make_batch(one_image(tokens), model) for tokens in (small, large)}
    expected = {tokens: gradients_of(model, batch, grads) for tokens, batch in batches.items()}
    ascending, descending = [batches[small], batches[large]], [batches[large], batches[small]]
    found: dict[str, list[Record]] = {}
    for repeat in range(REPEATS):
        first, later = _of_one_model("first", model, grads, ascending, expected)
        for record in [*([] if repeat else [first]), later]:
            found.setdefault(record["case"], []).append(record)
        for record in _of_one_model("next_model", model, grads, descending, expected):
            found.setdefault(record["case"], []).append(record)
    return [
        {
            **same[0],
            "ms": statistics.median(each["ms"] for each in same),
            "grad_rel": max(each["grad_rel"] for each in same),
            "replays": sum(each["replays"] for each in same),
            "repeats": len(same),
        }
        for same in found.values()
    ]


def _of_one_model(
    name: str, model: Any, grads: Any, batches: Sequence[Any], expected: dict[int, list[Any]]
) -> list[Record]:
    """Record the first size after a warm-up step with it, the second one before the step after that which asks."""
    options = VisionGraphOptions(
        impl="transformer_engine",
        buckets=tuple(sorted(batch.tokens for batch in batches)),
        grows=True,
        slots=1,
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
        gradients = gradients_of(model, batch, grads, graphs.step())
        replays = graphs.statistics().replays - before
        rel = tower.largest_relative(gradients, expected[batch.tokens])
        found = {"ms": took * 1e3, "grad_rel": rel, "replays": replays}
        records.append({"case": f"{case}_{batch.tokens}", "tokens": batch.tokens, **found})
    helper.delete_cuda_graphs()
    return records


def gradients_of(model: Any, batch: Any, grads: Any, step: AbstractContextManager[object] | None = None) -> list[Any]:
    """Return the gradients of one microbatch, run inside `step`."""
    grads.zero()
    with step or nullcontext():
        tower.step(model, batch)
    gradients: list[Any] = grads.copy()
    return gradients


def seconds_of(work: Callable[[], None]) -> float:
    """Return how long training waits for some work: from the end of all before it, compilers in other threads too."""
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def main(words: list[str] | None = None) -> int:
    """Measure and write the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/vision_captures.jsonl on a GPU")
    parser.add_argument("--small", type=int, default=784, help="tokens of the small image")
    parser.add_argument("--large", type=int, default=8192, help="tokens of the large image")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.part is not None:
        args.part.write_text(json.dumps(captures(args.small, args.large)))
        return 0
    out = output_path(args.out, "vision_captures.jsonl")
    for record in measure(args.small, args.large):
        put_record(out, record)
        print({name: record[name] for name in ("case", "mode", "ms", "grad_rel", "replays")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
