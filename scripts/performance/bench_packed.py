"""Times of packed language models, forward plus backward: eager and the plugin's graphs.

python scripts/performance/bench_packed.py --out docs/benchmarks/packed.jsonl
python scripts/performance/bench_packed.py --models "" --plans --cost-model docs/benchmarks/costs.json

Measures every model at every pack, graphs of every layer's parts, of all layers with their experts, and graphs that
allow four times the documents there are, each model in a process of its own; they import side by side and have the GPU
one after the other. `--cost-model` fits the planner's cost model, `--plans` also measures what the planner predicts,
for three distributions. Times are of default algorithms; under deterministic ones graphs must equal eager to the bit. A
record is written as soon as it is measured; after `--seconds` no further pack begins.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_tools.benchmarks.packed.bench import PLANNED
from bridge_cg_tools.benchmarks.packed.cases import PLANS, run_cases
from bridge_cg_tools.benchmarks.packed.limits import WANTED, failures
from bridge_cg_tools.benchmarks.records.results import output_path

# mamba needs packages that are compiled.
DEFAULT_MODELS = ("dense", "moe", "large")


def main() -> int:
    """Measure, write the records, print a table; non-zero when something wanted is missed or was not measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="docs/benchmarks/packed.jsonl if left out")
    parser.add_argument("--cost-model", type=Path, help="write the fitted cost model here")
    parser.add_argument("--planned", choices=(*WANTED, PLANNED), default=PLANNED, help="model that is planned for")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=600.0, help="no further pack begins after this long")
    models = f"comma-separated, of {', '.join(WANTED)}, or empty"
    parser.add_argument("--models", default=",".join(DEFAULT_MODELS), help=models)
    parser.add_argument("--fused-rope", action="store_true", help="eager rotates with Transformer Engine's kernel")
    parser.add_argument("--plans", action="store_true", help="measure the planner's predictions, too")
    args = parser.parse_args()
    out = output_path(args.out, "packed.jsonl").resolve()
    words = ["--records", str(out), "--repeats", str(args.repeats), *(["--fused-rope"] * args.fused_rope)]
    cases = [model for model in args.models.split(",") if model]
    if args.plans or args.cost_model:
        cases.append(PLANS)
        words += ["--planned", args.planned, *["--plans"] * args.plans]
        words += ["--cost-model", str(args.cost_model.resolve())] if args.cost_model else []
    records, missed = run_cases(cases, words, args.seconds, out)
    missed = [*failures(records), *missed]
    print("\n".join(missed) or f"all {len(records)} records inside their limits")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
