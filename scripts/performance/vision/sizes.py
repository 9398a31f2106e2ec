"""The vision tower on images of real sizes, eager and on graphs with planned buckets."""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from bridge_cg_plugin.cli.runs.results import provenance
from scripts.performance.models.workloads import Grid, tokens_of

CASE = "coco"
MODES = ("plugin", "on_demand", "each_size")


def measure(
    grids: list[Grid], warmup: int, kernels: str, seed: int, modes: Sequence[str] = MODES[:1]
) -> Iterator[dict[str, Any]]:
    """Run all microbatches eager and on graphs; yields a record of each, and the limit's.

    Args:
        grids: The images of each microbatch.
        warmup: Microbatches that run eager before graphs are captured.
        kernels: "exact" or "fast".
        seed: Of the images' sizes.
        modes: How buckets are chosen; see `MODES`.
    """
    from scripts.performance.models import tower
    from scripts.performance.models.arithmetic import limit_ms

    tower.start_process()
    model = tower.build_tower()
    grads = tower.MainGrads(model)
    batches = [tower.make_batch(grid, model, seed=index) for index, grid in enumerate(grids)]
    for batch in batches[:warmup]:
        tower.step(model, batch)
    common = {"case": CASE, "tokens": sum(map(tokens_of, grids)), "images": sum(map(len, grids))}
    common |= {"microbatches": len(grids), **provenance(1, seed)}
    eager_ms, expected = run_all(model, batches, grads)
    yield {**common, "mode": "eager", "ms": eager_ms, "ratio": 1.0}
    for mode in modes:
        found = on_graphs(model, grads, batches, warmup, options_of(mode, kernels, grids), expected)
        name = "plugin_fast" if mode == "plugin" and kernels == "fast" else mode
        yield {**common, "mode": name, "ratio": found["ms"] / eager_ms, **found}
    yield {**common, "mode": "limit", "ms": sum(map(limit_ms, grids))}


def options_of(mode: str, kernels: str, grids: Sequence[Grid]) -> dict[str, Any]:
    """Return the options of a way to choose buckets."""
    if mode == "each_size":
        frames = max(sum(t for t, _, _ in grid) for grid in grids)  # bounds of more would be recorded for each size
        return {"kernels": kernels, "buckets": tuple(sorted(set(map(tokens_of, grids)))), "max_frames": frames}
    return {"kernels": kernels, "capture_mode": "on_demand" if mode == "on_demand" else "at_once"}


def on_graphs(
    model: Any, grads: Any, batches: list[Any], warmup: int, options: dict[str, Any], expected: list[Any]
) -> dict[str, Any]:
    """Run all microbatches on graphs twice, first as training meets them; returns what is measured."""
    from bridge_cg_plugin.options import VisionGraphOptions
    from bridge_cg_plugin.upstream.hooks.helpers.vision_helper import VisionTECudaGraphHelper
    from scripts.performance.models import tower

    chosen = VisionGraphOptions(impl="transformer_engine", slots=1, evaluation=False, strict=True, **options)
    helper = VisionTECudaGraphHelper(model, model.config, options=chosen)
    for batch in batches[:warmup]:
        tower.step(model, batch)
    helper.create_cudagraphs()
    graphs = helper.graphs
    assert graphs is not None
    run_all(model, batches, grads, graphs)
    first = graphs.statistics()
    seen: dict[str, Any] = {
        "eager_share": first.fallbacks.total() / len(batches),
        "fallbacks": dict(first.fallbacks),
        "padding_share": first.padding_share,
        "replays": first.replays,
        "capture_s": first.capture_seconds,
        "longest_capture_s": first.longest_pause,
        "memory_gb": first.memory_bytes / 2**30,
        "graphs": first.as_dict(),
    }
    ms, gradients = run_all(model, batches, grads)
    print(graphs.report())
    helper.delete_cuda_graphs()
    return {"ms": ms, "grad_rel": tower.largest_relative(gradients, expected), **seen}


def run_all(model: Any, batches: list[Any], grads: Any, graphs: Any = None) -> tuple[float, list[Any]]:
    """Run every microbatch, one after another as in training; returns the ms of all and the sum of their gradients.

    Args:
        model: The tower.
        batches: The microbatches.
        grads: Where gradients are added up.
        graphs: The tower's graphs, so that each microbatch is a training step; None is one step of all.
    """
    from scripts.performance.measuring import measure
    from scripts.performance.models import tower

    grads.zero()
    measure.synchronize()
    began = time.perf_counter()
    for batch in batches:
        with nullcontext() if graphs is None else graphs.step():
            tower.step(model, batch)
    measure.synchronize()
    return (time.perf_counter() - began) * 1e3, grads.copy()
