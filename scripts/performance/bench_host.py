"""The host's time of a replayed microbatch, from pixel values to embeddings and back, phase by phase.

    python scripts/performance/bench_host.py
    python scripts/performance/bench_host.py --cases 1x448,8mix --steps 40

Steps of four microbatches under Megatron's data parallelism with overlapping reductions, as Bridge's loop runs them:
the last one's gradients are awaited, so what hooks do for it is in its time. Microbatches follow one another without
waiting for the GPU, or each begins with the GPU and the host idle. Without a GPU a small tower with as many parameters
stands in, and nothing is computed in place of the graphs, so that only the host's work is left.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.performance.models import tower
from scripts.performance.models.workloads import CASES, workloads
from scripts.performance.vision.host import Training, devices, measure_steps


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", default="1x448,8mix,video16", help=f"comma-separated; all: {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each case and kind")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = parse(arguments)
    try:
        grids = workloads([part.strip() for part in args.cases.split(",") if part.strip()], ())
    except ValueError as error:
        print(f"bench_host.py: {error}", file=sys.stderr)
        return 2
    tower.start_process()
    with devices():
        measure_steps(Training(grids), args.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
