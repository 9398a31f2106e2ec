"""Memory against time of vision graphs whose activations are offloaded or recomputed."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bridge_cg_tools.benchmarks.models.workloads import Grid, description, tokens_of
from bridge_cg_tools.benchmarks.records.results import first_line, provenance

# Case -> slots.
SLOTS = {"1x2048": 1, "tokens_32768": 1, "8mix": 4}
# Mode -> options. Targets are parts of the memory of `none`.
FIXED: dict[str, dict[str, Any]] = {
    "none": {},
    "offload": {"offload": ("attention", "mlp", "layernorm", "merger", "other")},
    "recompute": {"recompute": ("layernorm", "gelu", "linear")},
}
GIB = 2**30


def summary(record: dict[str, Any]) -> str:
    """Return one line on a record."""
    head = f"{record['case']:13} {record['mode']:10}"
    if "error" in record:
        return f"{head} {record['error']}"
    return (
        f"{head} {record['ms']:8.1f} ms (x{record['ratio']:.3f}, forward {record['fwd_ms']:.1f}) "
        f"{record['memory_gb']:6.2f} GiB (x{record['memory_ratio']:.2f}) host {record['pinned_gb']:5.2f} GiB "
        f"copies {record.get('copy_ms', 0):.0f} ms, {record.get('copy_overlap', 0):.0%} beside kernels, outputs "
        f"{'equal' if record['bit_equal'] else 'DIFFER'}, gradients {record['grad_rel']:.1e} "
        f"(two runs {record['grad_noise']:.1e}), capture {record['capture_s']:.1f} s"
    )


class Bench:
    """The tower and what is measured on it.

    Args:
        repeats: Timed runs of each mode.
    """

    def __init__(self, repeats: int) -> None:
        from bridge_cg_tools.benchmarks.models import tower

        tower.start_process()
        self.repeats = repeats
        self.model = tower.build_tower()
        self.grads = tower.MainGrads(self.model)

    def case(
        self, name: str, grid: Grid, slots: int, modes: Sequence[str], targets: Sequence[float], deadline: float
    ) -> Iterator[dict[str, Any]]:
        """Yield a record of every mode of a case."""
        from bridge_cg_tools.benchmarks.models import tower

        batches = [tower.make_batch(grid, self.model, seed=seed) for seed in range(slots)]
        baseline: dict[str, Any] | None = None
        expected: tuple[list[Any], list[Any]] | None = None
        asked: list[tuple[str, dict[str, Any], float | None]] = [
            (mode, FIXED[mode], None) for mode in FIXED if mode in modes
        ]
        asked += [(f"mixed_{round(100 * target)}", {}, target) for target in targets]
        for mode, options, target in asked:
            head = {**description(name, mode, grid), "slots": slots, "bucket": tokens_of(grid)}
            try:
                if time.monotonic() > deadline:
                    raise TimeoutError("not measured: the time is used up; give more --seconds")
                if target is not None:
                    if baseline is None:
                        raise RuntimeError("not measured: no mode without a memory target was")
                    options = {"offload_above_gb": target * baseline["memory_gb"] / slots}
                record, found = self.mode(batches, options)
                baseline, expected = baseline or record, expected or found
                record |= compared(record, baseline, found, expected)
                if target is not None:
                    record["memory_target_gb"] = options["offload_above_gb"] * slots
                yield {**head, **record}
            except Exception as error:
                yield {**head, "error": first_line(error), **provenance(0, 0)}
                if baseline is None:
                    return

    def mode(
        self, batches: Sequence[Any], options: dict[str, Any]
    ) -> tuple[dict[str, Any], tuple[list[Any], list[Any]]]:
        """Return a mode's record, and the outputs and gradients of one run."""
        from bridge_cg_tools.benchmarks.measuring import measure

        with self.graphs(batches, options) as helper:
            outputs, gradients = self.results(batches)
            again = self.results(batches)
            times = measure.median_times(lambda between: run(self.model, batches, between), self.repeats, warmup=1)
            statistics = helper.graphs.statistics()
            record = {
                "ms": times.ms,
                "fwd_ms": times.fwd_ms,
                "host_ms": times.host_ms,
                "memory_gb": statistics.memory_bytes / GIB,
                "pinned_gb": statistics.pinned_bytes / GIB,
                "capture_s": statistics.capture_seconds,
                "grad_noise": relative(again[1], gradients),
                "fallbacks": dict(statistics.fallbacks),
                **rebuilding(helper),
                **copies(lambda: run(self.model, batches)),
                **provenance(times.repeats, 0),
            }
            if statistics.fallbacks:
                raise RuntimeError(f"some batches ran eager: {dict(statistics.fallbacks)}")
        return record, (outputs, gradients)

    @contextmanager
    def graphs(self, batches: Sequence[Any], options: dict[str, Any]) -> Iterator[Any]:
        """Capture the tower with a bucket of exactly the batches' size; yields the helper."""
        from bridge_cg_plugin.options import VisionGraphOptions
        from bridge_cg_tools.benchmarks.measuring.memory import collect
        from bridge_cg_tools.benchmarks.models.modes import new_helper

        first = batches[0]
        settings = {"buckets": (first.tokens,), "slots": len(batches), "max_frames": first.frames, "exact_below": 0}
        helper = new_helper(
            self.model,
            VisionGraphOptions(
                impl="transformer_engine", evaluation=False, cost_fallback=False, strict=True, **settings, **options
            ),
        )
        try:
            yield helper
        finally:
            helper.delete_cuda_graphs()
            collect()

    def results(self, batches: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return outputs of all batches, and their summed gradients."""
        self.grads.zero()
        outputs = run(self.model, batches)
        return [output.clone() for output in outputs], self.grads.copy()


def run(model: Any, batches: Sequence[Any], between: Any = None) -> list[Any]:
    """Run all forwards, then all backwards; returns all outputs. `between` is called when forwards are submitted."""
    import torch

    from bridge_cg_tools.benchmarks.models import tower

    made = [tower.forward(model, batch) for batch in batches]
    if between is not None:
        between()
    for outputs, batch in zip(made, batches, strict=True):
        torch.autograd.backward(outputs, batch.gradients)
    return [output.detach() for outputs in made for output in outputs]


def relative(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest relative difference of matching tensors."""
    from bridge_cg_tools.benchmarks.models import tower

    return tower.largest_relative(actual, expected)


def compared(
    record: dict[str, Any], baseline: dict[str, Any], found: tuple[Any, ...], expected: tuple[Any, ...]
) -> dict[str, Any]:
    """Return the fields that compare a mode with the graph that keeps all activations."""
    import torch

    return {
        "ratio": record["ms"] / baseline["ms"],
        "memory_ratio": record["memory_gb"] / baseline["memory_gb"],
        "forward_rel": relative(found[0], expected[0]),
        "bit_equal": all(map(torch.equal, found[0], expected[0])),
        "grad_rel": relative(found[1], expected[1]),
        "grad_noise": baseline["grad_noise"],
    }


def rebuilding(helper: Any) -> dict[str, Any]:
    """Return the ms that a GiB of each kind takes to be recomputed, where a memory target had it measured."""
    (region,) = helper.graphs._regions
    costs = {} if region._offloading is None else region._offloading.rebuild_ms
    return {"rebuild_ms_per_gb": {"/".join(group): ms * GIB for group, ms in costs.items()}} if costs else {}


def copies(step: Any) -> dict[str, float]:
    """Return the ms of copies between device and host in one step, and which part of it ran beside kernels."""
    from bridge_cg_tools.benchmarks.measuring import measure

    spans = measure.spans(step)
    moving = [(start, end) for start, end, name in spans if "DtoH" in name or "HtoD" in name]
    total = sum(end - start for start, end in moving) / 1e3
    if not total:
        return {}
    kernels = [(start, end) for start, end, name in spans if not name.startswith(("Memcpy", "Memset"))]
    return {"copy_ms": total, "copy_overlap": measure.overlap_us(moving, kernels) / 1e3 / total}
