"""The vision tower on images of real sizes: eager and the plugin with buckets that it planned itself.

    python scripts/performance/bench_sizes.py

Microbatches of 1 to 4 images with sizes as COCO's (`workloads.coco_image` has the source and the sampling), from a
fixed seed. The plugin sees the first ones eager, as in training's warm-up steps, plans its buckets from them, and then
runs all. Times are from the first launch to the end of the last kernel, over all microbatches, gradients accumulated.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.performance.results import output_path, provenance, put_record  # noqa: E402
from scripts.performance.workloads import Grid, coco_microbatches, tokens_of  # noqa: E402

CASE = "coco"


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/vision_sizes.jsonl on a GPU")
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=16, help="microbatches that buckets are planned from")
    parser.add_argument("--most-images", type=int, default=4, help="most images of one microbatch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kernels", choices=("exact", "fast"), default="exact")
    return parser.parse_args()


def main() -> int:
    """Measure both and write the records."""
    args = parse()
    try:
        out = output_path(args.out, "vision_sizes.jsonl")
        if not 1 <= args.warmup <= args.microbatches:
            raise ValueError(
                f"--warmup {args.warmup}: allowed is 1 to --microbatches={args.microbatches}; buckets come from these"
            )
    except ValueError as error:
        print(f"bench_sizes.py: {error}", file=sys.stderr)
        return 2
    grids = coco_microbatches(args.microbatches, args.most_images, args.seed)
    for record in measure(grids, args.warmup, args.kernels, args.seed):
        put_record(out, record)
        print({name: record[name] for name in ("mode", "ms", "ratio", "padding_share", "fallbacks") if name in record})
    return 0


def measure(grids: list[Grid], warmup: int, kernels: str, seed: int) -> list[dict[str, Any]]:
    """Run all microbatches eager and on graphs; returns both records, and the limit's."""
    from bridge_cg_plugin.options import VisionGraphOptions
    from bridge_cg_plugin.upstream.hooks.vision_helper import VisionTECudaGraphHelper
    from scripts.performance import tower
    from scripts.performance.arithmetic import limit_ms

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


def run_all(model: Any, batches: list, grads: Any) -> tuple[float, list]:
    """Run every microbatch, one after another as in training; returns the ms of all and the sum of their gradients."""
    from scripts.performance import measure, tower

    grads.zero()
    measure.synchronize()
    began = time.perf_counter()
    for batch in batches:
        tower.step(model, batch)
    measure.synchronize()
    return (time.perf_counter() - began) * 1e3, grads.copy()


if __name__ == "__main__":
    sys.exit(main())
