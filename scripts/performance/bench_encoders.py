"""Times of the encoders beside Qwen3-VL's, forward plus backward: eager and the plugin, with parity beside every time.

    python scripts/performance/bench_encoders.py
    python scripts/performance/bench_encoders.py --encoders siglip --layers 4

Gradients are accumulated into fp32 `main_grad`; buckets are of exactly a case's size. Kernels round as eager's do, and
again as by default ("plugin_fast") where that differs. Records go to docs/benchmarks/encoders.jsonl.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.performance.encoders import ENCODERS, Batch, Encoder, step  # noqa: E402
from scripts.performance.results import output_path, provenance, put_record  # noqa: E402

GIB = 2**30
SECONDS = 1.0  # no further repeat of a measurement begins after this long


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--encoders", default=",".join(ENCODERS), help=f"comma-separated; all: {', '.join(ENCODERS)}")
    parser.add_argument("--layers", type=int, help="of every encoder; the full size if left out")
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each measurement, at least 3")
    parser.add_argument("--out", type=Path, help="file of records; docs/benchmarks/encoders.jsonl on a GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the records; status 2 for a wrong argument."""
    args = parse(arguments)
    try:
        names = [name.strip() for name in args.encoders.split(",")]
        unknown = [name for name in names if name not in ENCODERS]
        if unknown:
            raise ValueError(f"--encoders {unknown[0]}: allowed is any of {', '.join(ENCODERS)}; correct the name")
        if args.layers is not None and args.layers < 2:
            raise ValueError(f"--layers {args.layers}: allowed are whole numbers from 2 on; correct it")
        out = output_path(args.out, "encoders.jsonl")
    except ValueError as error:
        print(f"bench_encoders.py: {error}", file=sys.stderr)
        return 2
    from scripts.performance import tower

    tower.start_process()
    for name in names:
        for record in measure(name, ENCODERS[name], args.layers or ENCODERS[name].layers, args.repeats):
            put_record(out, record)
            print_record(record)
    return 0


def measure(name: str, encoder: Encoder, layers: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the records of every size of one encoder, eager and on graphs."""
    from scripts.performance import tower

    model = encoder.build(layers)
    grads = tower.MainGrads(model)
    for case, size in encoder.sizes.items():
        batch = encoder.make_batch(model, size, 1)
        eager = _run(encoder, model, grads, batch)
        noise = _differences(_run(encoder, model, grads, batch), eager)
        common = {"case": f"{name}_{case}_{layers}layers", "tokens": batch.tokens, "images": batch.images}
        eager_ms, fields = _times(encoder, model, batch, repeats)
        yield {**common, "mode": "eager", "ratio": 1.0, **fields}
        for mode in encoder.modes:
            helper = _graphs(model, batch, "fast" if mode == "plugin_fast" else "exact")
            found = _differences(_run(encoder, model, grads, batch), eager)
            ms, fields = _times(encoder, model, batch, repeats)
            statistics = helper.graphs.statistics()
            yield {
                **common,
                "mode": mode,
                "ratio": ms / eager_ms,
                "forward_rel": found[0],
                "forward_noise": noise[0],
                "bit_equal": found[0] == 0.0,
                "grad_rel": found[1],
                "grad_noise": noise[1],
                "memory_gb": statistics.memory_bytes / GIB,
                "capture_s": statistics.capture_seconds,
                "fallbacks": dict(statistics.fallbacks),
                **fields,
            }
            helper.delete_cuda_graphs()


def _graphs(model: Any, batch: Batch, kernels: str) -> Any:
    """Capture one bucket of exactly the batch's size; returns the helper."""
    from bridge_cg_plugin.options import VisionGraphOptions
    from bridge_cg_plugin.upstream.hooks.vision_helper import VisionTECudaGraphHelper

    options = VisionGraphOptions(
        impl="transformer_engine",
        buckets=(batch.tokens,),
        kernels=kernels,
        evaluation=False,
        strict=True,
        cost_fallback=False,
    )
    helper = VisionTECudaGraphHelper(model, model.config, options=options)
    helper.create_cudagraphs()
    return helper


def _run(encoder: Encoder, model: Any, grads: Any, batch: Batch) -> tuple[list, list]:
    """Run one step; returns the outputs and the gradients that say anything."""
    grads.zero()
    outputs = step(encoder, model, batch)
    return outputs, [g for g, said in zip(grads.copy(), encoder.compared(model), strict=True) if said]


def _differences(found: tuple[list, list], expected: tuple[list, list]) -> tuple[float, float]:
    """Return the largest relative L2 difference of an output, and of a gradient."""
    from scripts.performance.tower import largest_relative

    return largest_relative(found[0], expected[0]), largest_relative(found[1], expected[1])


def _times(encoder: Encoder, model: Any, batch: Batch, repeats: int) -> tuple[float, dict[str, Any]]:
    """Return the median in ms, and the fields that say how it was measured."""
    from scripts.performance.measure import median_times, profile

    times = median_times(lambda between: step(encoder, model, batch, between), repeats, seconds=SECONDS)
    kernels = profile(lambda: step(encoder, model, batch))
    fields = {"ms": times.ms, "fwd_ms": times.fwd_ms, "host_ms": times.host_ms}
    fields |= {"gpu_busy_ms": kernels.busy_ms, "kernels": kernels.count, "families": kernels.families()}
    return times.ms, {**fields, "top": [list(row) for row in kernels.largest(8)], **provenance(times.repeats, 1)}


def print_record(r: dict[str, Any]) -> None:
    """Print one record as a line."""
    line = f"{r['case']:28} {r['mode']:11} {r['tokens']:>6} tokens {r['ms']:>8.1f} ms (ratio {r['ratio']:.2f}), "
    line += f"busy {r['gpu_busy_ms']:.1f} ms, {r['kernels']} kernels"
    if "forward_rel" in r:
        line += f"; outputs {r['forward_rel']:.1e} (two eager runs {r['forward_noise']:.1e}), "
        line += f"gradients {r['grad_rel']:.1e} ({r['grad_noise']:.1e}), {r['memory_gb']:.1f} GiB"
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
