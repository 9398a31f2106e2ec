"""The vision tower on images of real sizes: eager, and the plugin with buckets that it chose itself.

    python scripts/performance/bench_sizes.py
    python scripts/performance/bench_sizes.py --microbatches 200 --modes plugin,on_demand,each_size

Microbatches of 1 to 4 images with sizes as COCO's (`workloads.coco_image` has the source and the sampling), from a
fixed seed. The plugin sees the first ones eager, as in training's warm-up steps, and then runs all, each as a step of
its own: with all buckets captured at once (plugin), as microbatches ask for them (on_demand), or one for each size that
comes (each_size). Times are of a second run over all, from the first launch to the end of the last kernel.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import output_path, put_record
from scripts.performance.models.workloads import coco_microbatches
from scripts.performance.vision.sizes import MODES, measure

SHOWN = ("mode", "ms", "ratio", "padding_share", "eager_share", "capture_s", "longest_capture_s", "memory_gb")


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/vision_sizes.jsonl on a GPU")
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--warmup", type=int, default=16, help="microbatches that buckets are planned from")
    parser.add_argument("--most-images", type=int, default=4, help="most images of one microbatch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", default="plugin", help=f"comma-separated; all: {', '.join(MODES)}")
    parser.add_argument("--kernels", choices=("exact", "fast"), default="exact")
    return parser.parse_args()


def main() -> int:
    """Measure both and write the records."""
    args = parse()
    try:
        out = output_path(args.out, "vision_sizes.jsonl")
        if not 1 <= args.warmup <= args.microbatches:
            raise ValueError(
                f"Cannot use --warmup {args.warmup}: it must be 1 to --microbatches={args.microbatches}. "
                "Buckets come from these."
            )
        if unknown := [mode for mode in args.modes.split(",") if mode not in MODES]:
            raise ValueError(f"Cannot use --modes {unknown[0]}: it must be any of {', '.join(MODES)}.")
    except ValueError as error:
        print(f"bench_sizes.py: {error}", file=sys.stderr)
        return 2
    grids = coco_microbatches(args.microbatches, args.most_images, args.seed)
    for record in measure(grids, args.warmup, args.kernels, args.seed, args.modes.split(",")):
        put_record(out, record)
        print({name: record[name] for name in SHOWN if name in record})
    return 0


if __name__ == "__main__":
    sys.exit(main())
