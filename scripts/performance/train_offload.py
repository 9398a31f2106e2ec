"""Trains a packed language model whose activations leave its graphs: where memory is short, and for many steps.

    python scripts/performance/train_offload.py
    python scripts/performance/train_offload.py --cases flat --flat-steps 400

`limit`: packs in flight, all forwards and then all backwards as a pipeline's first stage has them, under a limit on
what the process may take of the device (`limit_gb` in the records). Eager and graphs that keep their activations must
run out of memory; graphs with a memory target must train, with the losses of eager steps under Megatron's recompute.
Algorithms are the default ones: cuDNN's deterministic backward takes 64 GiB of workspace for packs of this size.
`flat`: steps on graphs that offload everything; device and host memory at a few of them must be the same.
Records go to docs/benchmarks/offload_training.jsonl.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import output_path, put_record
from scripts.performance.offload.cases import CASES, flat_records, limit_records, misses, summary
from scripts.performance.offload.training import LOOKS


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and write the records; non-zero if a run did not do what its case says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/offload_training.jsonl on a GPU")
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated; all: {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=8, help="steps of every run of `limit`")
    parser.add_argument("--flat-steps", type=int, default=200, help="steps of `flat`, more than 100")
    args = parser.parse_args(arguments)
    cases = args.cases.split(",")
    if not set(cases) <= set(CASES) or args.steps < 2 or args.flat_steps <= max(LOOKS):
        print(
            f"train_offload.py: Cannot use --cases {args.cases} --steps {args.steps} --flat-steps {args.flat_steps}: "
            f"they must be of {', '.join(CASES)}, at least 2, and more than {max(LOOKS)}. Correct them.",
            file=sys.stderr,
        )
        return 2
    out = output_path(args.out, "offload_training.jsonl")
    makers = {"limit": lambda: limit_records(args.steps), "flat": lambda: flat_records(args.flat_steps)}
    missed = []
    for case in cases:
        records = []
        for record in makers[case]():
            put_record(out, record)
            print(summary(record), flush=True)
            records.append(record)
        missed += misses(records)
    print("\n".join(missed) or "every run did what its case says")
    return 1 if missed else 0


if __name__ == "__main__":
    import bridge_cg_plugin
    from scripts.performance.models.tower import start_process

    bridge_cg_plugin.activate()
    start_process()
    sys.exit(main())
