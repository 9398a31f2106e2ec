"""Memory against time of vision graphs whose activations are offloaded, recomputed, or both as a memory target asks.

    python scripts/performance/bench_offload.py
    python scripts/performance/bench_offload.py --cases 1x2048 --targets 0.5,0.4,0.3
    python scripts/performance/bench_offload.py --slots 1

Every mode replays the same batches on the same weights as `none`, the graph that keeps all activations. A case with
several slots runs as many forwards and then their backwards, as a pipeline's first stage does. Records go to
docs/benchmarks/offload.jsonl; a mode that fails has a record with the error.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.performance.results import first_line, output_path, provenance, put_record  # noqa: E402
from scripts.performance.workloads import Grid, description, tokens_of, workloads  # noqa: E402

# Case -> slots.
SLOTS = {"1x2048": 1, "tokens_32768": 1, "8mix": 4}
# Mode -> options. Targets are parts of the memory of `none`.
FIXED: dict[str, dict[str, Any]] = {
    "none": {},
    "offload": {"offload": ("attention", "mlp", "layernorm", "merger", "other")},
    "recompute": {"recompute": ("layernorm", "gelu", "linear")},
}
TARGETS = "0.6,0.4,0.3,0.25"
GIB = 2**30


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/offload.jsonl on a GPU")
    parser.add_argument("--cases", default=",".join(SLOTS), help=f"comma-separated; all: {', '.join(SLOTS)}")
    parser.add_argument("--modes", default=",".join(FIXED), help=f"beside targets; all: {', '.join(FIXED)}")
    parser.add_argument("--targets", default=TARGETS, help="memory targets of modes mixed_N, parts of none's memory")
    parser.add_argument("--slots", type=int, help="microbatches in flight; the case's own by default")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each mode, at least 3")
    parser.add_argument("--seconds", type=float, default=300.0, help="no further mode begins after this long")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the records."""
    args = parse(arguments)
    try:
        cases, modes, targets, out = checked(args)
    except ValueError as error:
        print(f"bench_offload.py: {error}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + args.seconds
    bench = Bench(args.repeats)
    for name, grid in cases.items():
        for record in bench.case(name, grid, args.slots or SLOTS.get(name, 1), modes, targets, deadline):
            put_record(out, record)
            print(summary(record), flush=True)
    return 0


def checked(args: argparse.Namespace) -> tuple[dict[str, Grid], list[str], list[float], Path]:
    """Return cases, modes, targets and file.

    Raises:
        ValueError: A name is unknown, or a number out of range.
    """
    modes = [mode for mode in args.modes.split(",") if mode]
    unknown = [mode for mode in modes if mode not in FIXED]
    if unknown or "none" not in modes:
        raise ValueError(f"--modes {args.modes}: allowed are none and any of {', '.join(FIXED)}; correct the list")
    targets = [float(part) for part in args.targets.split(",") if part]
    if not all(0 < target < 1 for target in targets):
        raise ValueError(f"--targets {args.targets}: allowed are numbers between 0 and 1; correct the list")
    if args.slots is not None and args.slots < 1:
        raise ValueError(f"--slots {args.slots}: allowed is a whole number of at least 1; correct it")
    names = args.cases.split(",")
    counts = [int(name.removeprefix("tokens_")) for name in names if name.startswith("tokens_")]
    cases = workloads([name for name in names if not name.startswith("tokens_")], counts)
    return cases, modes, targets, output_path(args.out, "offload.jsonl")


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
        from scripts.performance import tower

        tower.start_process()
        self.repeats = repeats
        self.model = tower.build_tower()
        self.grads = tower.MainGrads(self.model)

    def case(
        self, name: str, grid: Grid, slots: int, modes: Sequence[str], targets: Sequence[float], deadline: float
    ) -> Iterator[dict[str, Any]]:
        """Yield a record of every mode of a case."""
        from scripts.performance import tower

        batches = [tower.make_batch(grid, self.model, seed=seed) for seed in range(slots)]
        baseline: dict[str, Any] | None = None
        expected: tuple[list, list] | None = None
        asked = [(mode, FIXED[mode], None) for mode in FIXED if mode in modes]
        asked += [(f"mixed_{round(100 * target)}", {}, target) for target in targets]
        for mode, options, target in asked:
            head = {**description(name, mode, grid), "slots": slots, "bucket": tokens_of(grid)}
            try:
                if time.monotonic() > deadline:
                    raise TimeoutError("not measured: the time is used up; give more --seconds")
                if target is not None:
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

    def mode(self, batches: Sequence[Any], options: dict[str, Any]) -> tuple[dict[str, Any], tuple[list, list]]:
        """Return a mode's record, and the outputs and gradients of one run."""
        from scripts.performance import measure

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
        from scripts.performance.group import collect
        from scripts.performance.modes import new_helper

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

    def results(self, batches: Sequence[Any]) -> tuple[list, list]:
        """Return outputs of all batches, and their summed gradients."""
        self.grads.zero()
        outputs = run(self.model, batches)
        return [output.clone() for output in outputs], self.grads.copy()


def run(model: Any, batches: Sequence[Any], between: Any = None) -> list:
    """Run all forwards, then all backwards; returns all outputs. `between` is called when forwards are submitted."""
    import torch

    from scripts.performance import tower

    made = [tower.forward(model, batch) for batch in batches]
    if between is not None:
        between()
    for outputs, batch in zip(made, batches, strict=True):
        torch.autograd.backward(outputs, batch.gradients)
    return [output.detach() for outputs in made for output in outputs]


def relative(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest relative difference of matching tensors."""
    from scripts.performance import tower

    return tower.largest_relative(actual, expected)


def compared(record: dict[str, Any], baseline: dict[str, Any], found: tuple, expected: tuple) -> dict[str, Any]:
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
    """Return the ms that a GiB of each kind takes to be made again, where a memory target had it measured."""
    (region,) = helper.graphs._regions
    costs = {} if region._offloading is None else region._offloading.rebuild_ms
    return {"rebuild_ms_per_gb": {"/".join(group): ms * GIB for group, ms in costs.items()}} if costs else {}


def copies(step: Any) -> dict[str, float]:
    """Return the ms of copies between device and host in one step, and which part of it ran beside kernels."""
    from scripts.performance import measure

    spans = measure.spans(step)
    moving = [(start, end) for start, end, name in spans if "DtoH" in name or "HtoD" in name]
    total = sum(end - start for start, end in moving) / 1e3
    if not total:
        return {}
    kernels = [(start, end) for start, end, name in spans if not name.startswith(("Memcpy", "Memset"))]
    return {"copy_ms": total, "copy_overlap": measure.overlap_us(moving, kernels) / 1e3 / total}


if __name__ == "__main__":
    sys.exit(main())
