"""Times of encoders, forward plus backward: eager and the plugin, with parity beside every time.

    python scripts/performance/bench_vision.py
    python scripts/performance/bench_vision.py --cases 1x448,8mix --modes plugin,plugin_flash
    python scripts/performance/bench_vision.py --encoders siglip,qwen25_vl --layers 4

Qwen3-VL's tower, or other encoders. Gradients are accumulated into fp32 `main_grad`; buckets are of exactly a case's
size. Records go to docs/benchmarks/vision_bench.jsonl, of other encoders to encoders.jsonl.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.performance.encoders import MODES, measure
from scripts.performance.records import at_least, names_of, output_path, put_record
from tests.models import tower
from tests.models.encoders import ENCODERS

CASES = tuple(dict.fromkeys(case for encoder in ENCODERS.values() for case in encoder.sizes))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    listed = ", ".join(ENCODERS)
    parser.add_argument("--encoders", type=names_of(*ENCODERS), default=("qwen3_vl",), help=f"of {listed}")
    parser.add_argument("--cases", type=names_of(*CASES), default=CASES, help=f"of {', '.join(CASES)}")
    parser.add_argument("--modes", type=names_of(*MODES), help=f"each encoder's own if left out; of {', '.join(MODES)}")
    parser.add_argument("--layers", type=at_least(2), help="of every encoder; the full size if left out")
    parser.add_argument("--repeats", type=at_least(3), default=9, help="timed runs of each measurement")
    parser.add_argument("--out", type=Path, help="records; in docs/benchmarks on a GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the records."""
    args = parse(arguments)
    tower.start_process()
    for name in args.encoders:
        out = output_path(args.out, "vision_bench.jsonl" if name == "qwen3_vl" else "encoders.jsonl")
        sizes = {case: size for case, size in ENCODERS[name].sizes.items() if case in args.cases}
        encoder = replace(ENCODERS[name], sizes=sizes)
        for record in measure(name, encoder, args.layers or encoder.layers, args.repeats, args.modes):
            put_record(out, record)
            print_record(record)
    return 0


def print_record(r: dict[str, Any]) -> None:
    """Print one record as a line."""
    line = f"{r['case']:28} {r['mode']:20} {r['tokens']:>6} tokens {r['ms']:>8.1f} ms (ratio {r['ratio']:.2f}), "
    line += f"host {r['host_ms']:.1f} ms, busy {r['gpu_busy_ms']:.1f} ms, {r['kernels']} kernels"
    if "forward_rel" in r:
        line += f"; outputs {r['forward_rel']:.1e} (two eager runs {r['forward_noise']:.1e}), "
        line += f"gradients {r['grad_rel']:.1e} ({r['grad_noise']:.1e}), {r['memory_gb']:.1f} GiB"
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
