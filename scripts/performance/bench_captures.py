"""How long one recording of the vision tower takes, in processes without and with compiled kernels in Triton's cache.

    python scripts/performance/bench_captures.py

Each process warms up with the small image, records its bucket (first), and records the large image's bucket when a step
asks for it (later). It does the same for another model's graphs the other way round (next_model, later). What may come
again is measured three times in each process, and the median is kept. Every recording's gradients are compared with
eager's.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import output_path, put_record
from scripts.performance.vision.captures import measure


def main(words: list[str] | None = None) -> int:
    """Measure and write the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/vision_captures.jsonl on a GPU")
    parser.add_argument("--small", type=int, default=784, help="tokens of the small image")
    parser.add_argument("--large", type=int, default=8192, help="tokens of the large image")
    args = parser.parse_args(words)
    try:
        out = output_path(args.out, "vision_captures.jsonl")
    except ValueError as error:
        print(f"bench_captures.py: {error}", file=sys.stderr)
        return 2
    for record in measure(args.small, args.large):
        put_record(out, record)
        print({name: record[name] for name in ("case", "mode", "ms", "grad_rel", "replays")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
