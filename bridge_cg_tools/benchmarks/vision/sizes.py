"""The vision tower on images of real sizes, eager and on graphs with planned buckets."""

import time
from typing import Any

from bridge_cg_tools.benchmarks.models.workloads import Grid, tokens_of
from bridge_cg_tools.benchmarks.records.results import provenance

CASE = "coco"


def measure(grids: list[Grid], warmup: int, kernels: str, seed: int) -> list[dict[str, Any]]:
    """Run all microbatches eager and on graphs; returns both records, and the limit's."""
    from bridge_cg_plugin.options import VisionGraphOptions
    from bridge_cg_plugin.upstream.hooks.vision_helper import VisionTECudaGraphHelper
    from bridge_cg_tools.benchmarks.models import tower
    from bridge_cg_tools.benchmarks.models.arithmetic import limit_ms

    tower.start_process()
    model = tower.build_tower()
    grads = tower.MainGrads(model)
    batches = [tower.make_batch(grid, model, seed=index) for index, grid in enumerate(grids)]
    for batch in batches[:warmup]:
        tower.step(model, batch)
    common = {"case": CASE, "tokens": sum(map(tokens_of, grids)), "images": sum(map(len, grids))}
    common |= {"microbatches": len(grids), **provenance(1, seed)}
    eager_ms, expected = run_all(model, batches, grads)
    records = [{**common, "mode": "eager", "ms": eager_ms, "ratio": 1.0}]

    options = VisionGraphOptions(impl="transformer_engine", slots=1, kernels=kernels, evaluation=False, strict=True)
    helper = VisionTECudaGraphHelper(model, model.config, options=options)
    for batch in batches[:warmup]:
        tower.step(model, batch)
    helper.create_cudagraphs()
    ms, gradients = run_all(model, batches, grads)
    statistics = helper.graphs.statistics()
    print(helper.graphs.report())
    records.append(
        {
            **common,
            "mode": "plugin" if kernels == "exact" else "plugin_fast",
            "ms": ms,
            "ratio": ms / eager_ms,
            "grad_rel": tower.largest_relative(gradients, expected),
            "padding_share": statistics.padding_share,
            "replays": statistics.replays,
            "fallbacks": dict(statistics.fallbacks),
            "memory_gb": statistics.memory_bytes / 2**30,
            "capture_s": statistics.capture_seconds,
            "graphs": statistics.as_dict(),
        }
    )
    helper.delete_cuda_graphs()
    return [*records, {**common, "mode": "limit", "ms": sum(map(limit_ms, grids))}]


def run_all(model: Any, batches: list[Any], grads: Any) -> tuple[float, list[Any]]:
    """Run every microbatch, one after another as in training; returns the ms of all and the sum of their gradients."""
    from bridge_cg_tools.benchmarks.measuring import measure
    from bridge_cg_tools.benchmarks.models import tower

    grads.zero()
    measure.synchronize()
    began = time.perf_counter()
    for batch in batches:
        tower.step(model, batch)
    measure.synchronize()
    return (time.perf_counter() - began) * 1e3, grads.copy()
