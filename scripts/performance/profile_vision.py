"""Where the GPU time of one forward plus backward goes: kernels by total time, and families of kernels.

    python scripts/performance/profile_vision.py --cases 1x768 --top 25
    python scripts/performance/profile_vision.py --modes eager,plugin,plugin_fast,plugin_flash --records

With --records, one record a case and mode goes to docs/benchmarks/vision_profile.jsonl, which plots.py draws.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import output_path, put_record
from scripts.performance.models.workloads import CASES, workloads
from scripts.performance.vision.profile import MODES, print_profile, profile_cases


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated; all: {', '.join(CASES)}")
    parser.add_argument("--modes", default=",".join(MODES), help=f"comma-separated; all: {', '.join(MODES)}")
    parser.add_argument("--top", type=int, default=25, help="kernels that are listed")
    parser.add_argument("--records", action="store_true", help="write records")
    parser.add_argument("--out", type=Path, help="their file; docs/benchmarks/vision_profile.jsonl on a GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile, print, write records."""
    args = parse(arguments)
    try:
        grids = workloads(args.cases.split(","), ())
        unknown = [mode for mode in args.modes.split(",") if mode not in MODES]
        if unknown:
            raise ValueError(
                f"Cannot use --modes {unknown[0]}: it must be any of {', '.join(MODES)}. Correct the name."
            )
        out = output_path(args.out, "vision_profile.jsonl") if args.records else None
    except ValueError as error:
        print(f"profile_vision.py: {error}", file=sys.stderr)
        return 2
    for record in profile_cases(grids, args.modes.split(","), args.top):
        print_profile(record)
        if out is not None:
            put_record(out, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
