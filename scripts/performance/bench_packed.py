"""Times of packed language models, forward plus backward: eager and the plugin's graphs.

python scripts/performance/bench_packed.py --out docs/benchmarks/packed.jsonl
python scripts/performance/bench_packed.py --models "" --plans --planned dense,moe,mamba --distributions known
python scripts/performance/bench_packed.py --models "" --planned moe --cost-model costs.json
python scripts/performance/bench_packed.py --models fp8

Measures every model at every pack, graphs of every layer's parts, of all layers with their experts, and graphs that
allow four times the documents there are, each model in a process of its own; they import side by side and have the GPU
one after the other. `--plans` measures what the planner forecasts for `--planned` models, and everything that it could
have chosen. `--cost-model` measures packs of many shapes and fits a cost model to them, which plans then go by; its
records are for fit_costs.py, too. Times are of default algorithms; under deterministic ones graphs must equal eager to
the bit. A record is written as soon as it is measured; after `--seconds` no further pack begins.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import output_path
from scripts.performance.packed.bench import PLANNED
from scripts.performance.packed.cases import PLANS, run_cases
from scripts.performance.packed.limits import WANTED, failures
from scripts.performance.packed.plans import DISTRIBUTIONS, NAMES

# mamba needs packages that are compiled.
DEFAULT_MODELS = ("dense", "moe", "large")


def _several(*names: str) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of comma-separated names, each of which must be one of these."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(name for name in text.split(",") if name)
        for name in found:
            if name not in names:
                raise argparse.ArgumentTypeError(f"must be of {', '.join(names)}, not {name!r}")
        return found

    return parse


def main() -> int:
    """Measure, write the records, print a table; non-zero when something wanted is missed or was not measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="docs/benchmarks/packed.jsonl if left out")
    parser.add_argument("--cost-model", type=Path, help="measure packs, and write a cost model fitted to them here")
    planned = f"comma-separated models that are planned for, of {', '.join((*WANTED, PLANNED))}"
    parser.add_argument("--planned", type=_several(*WANTED, PLANNED), default=(PLANNED,), help=planned)
    packs = f"comma-separated, of {', '.join(NAMES)}"
    parser.add_argument("--distributions", type=_several(*NAMES), default=tuple(DISTRIBUTIONS), help=packs)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=600.0, help="no further pack begins after this long")
    models = f"comma-separated, of {', '.join(WANTED)}, or empty"
    parser.add_argument("--models", default=",".join(DEFAULT_MODELS), help=models)
    parser.add_argument("--fused-rope", action="store_true", help="eager rotates with Transformer Engine's kernel")
    parser.add_argument("--plans", action="store_true", help="measure the planner's predictions, too")
    args = parser.parse_args()
    if args.cost_model and len(args.planned) > 1:
        parser.error("Cannot use --cost-model: it must have one model. Write one --planned.")
    out = output_path(args.out, "packed.jsonl").resolve()
    words = ["--records", str(out), "--repeats", str(args.repeats), *(["--fused-rope"] * args.fused_rope)]
    cases = [model for model in args.models.split(",") if model]
    if args.plans or args.cost_model:
        cases += [f"{PLANS}{model}" for model in args.planned]
        words += ["--distributions", ",".join(args.distributions), *["--plans"] * args.plans]
        words += ["--cost-model", str(args.cost_model.resolve())] if args.cost_model else []
    records, missed = run_cases(cases, words, args.seconds, out)
    missed = [*failures(records), *missed]
    print("\n".join(missed) or f"all {len(records)} records inside their limits")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
