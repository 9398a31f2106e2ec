"""The vision tower on images of real sizes: eager and the plugin with buckets that it planned itself.

    python scripts/performance/bench_sizes.py

Microbatches of 1 to 4 images with sizes as COCO's (`workloads.coco_image` has the source and the sampling), from a
fixed seed. The plugin sees the first ones eager, as in training's warm-up steps, plans its buckets from them, and then
runs all. Times are from the first launch to the end of the last kernel, over all microbatches, gradients accumulated.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_tools.benchmarks.models.workloads import coco_microbatches
from bridge_cg_tools.benchmarks.records.results import output_path, put_record
from bridge_cg_tools.benchmarks.vision.sizes import measure


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


if __name__ == "__main__":
    sys.exit(main())
