"""Train over several GPUs, eager several times and with vision graphs once, and write what came out as records.

    python scripts/performance/bench_parallel.py --small --microbatches 2 --dry-run --gpus 4
    python scripts/performance/bench_parallel.py --small --microbatches 2
    torchrun --standalone --nproc_per_node 4 scripts/performance/bench_parallel.py --small --layouts TP2xPP2 DP4

Every layout takes as many microbatches a step for each replica of the model, so DP2 and DP4 against one GPU are weak
scaling, and the others share one GPU's work.

Runs go in waves. Nothing shares a run's GPUs, nor its share of the cores, and the runs of a wave begin together: of
one GPU four at once on four, of two GPUs two, of four one. Timed are the first eager run and the graphed one, in their
last steps; they are of one wave, or, where a layout takes all GPUs, each is alone. While a wave trains, the processes
of the wave after the next import, on a quarter of the cores, which no run has, beside set-up and the first steps. How
long before a wave's end that was over is printed with what its timed steps took. --dry-run prints the waves and when
they are expected.

A layout's records are written when its last wave has ended, and when --seconds are over if its graphed run and two of
its eager ones have ended. With --ranks-per-gpu 2 layouts of more ranks than there are GPUs are trained as well, two
ranks on each GPU and with a narrower language model. Losses, memory and slots are what they are with a GPU for each
rank; times are not taken.

With --balance, replicas of the model are trained once more with graphs, and encode images of other ranks where these
have more. Records say how far the ranks' tokens of a step are apart (`token_imbalance`).

--slots trains layouts with graphs for a few steps of 8 and of 32 microbatches: graphs must take as much memory with
these as with those.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import output_path
from scripts.performance.layouts.bench import FEWEST_EAGER_RUNS, Bench, check
from scripts.performance.layouts.jobs import LAYOUTS, MUST, waves
from scripts.performance.layouts.times import plan
from scripts.performance.measuring.machine import gpus_here

MOST_RANKS_PER_GPU = 4


def main(words: Sequence[str] | None = None) -> int:
    """Run the layouts and write records; returns 0 if graphs stayed inside eager's spread in all of them."""
    args = parse(words)
    if int(os.environ.get("RANK", 0)):
        return 0  # torchrun's first process starts those that train
    gpus = gpus_here() if args.gpus is None else args.gpus
    layouts, slots = ([LAYOUTS[name] for name in names] for names in (args.layouts, args.slots))
    check(layouts, slots, gpus, args.ranks_per_gpu)
    runs = waves(layouts, slots, args.microbatches, args.steps, args.eager_runs, gpus, args.balance)
    print("\n".join(plan(runs, args.seconds)), flush=True)
    if args.dry_run:
        return 0
    bench = Bench(args, output_path(args.out, "parallel.jsonl"), gpus)
    return 0 if all(bench.run(runs)) else 1


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layouts", nargs="*", choices=LAYOUTS, default=MUST, metavar="LAYOUT", help=", ".join(LAYOUTS)
    )
    parser.add_argument(
        "--slots", nargs="*", choices=LAYOUTS, default=(), metavar="LAYOUT", help="of 8 and of 32 microbatches"
    )
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of each run")
    parser.add_argument(
        "--microbatches", type=int, default=8, help="microbatches of a step, one sample each, for each model replica"
    )
    parser.add_argument("--eager-runs", type=int, default=3, metavar="N", help="eager runs of each layout, at least 2")
    parser.add_argument(
        "--balance", action="store_true", help="train replicas of the model with images of other ranks, too"
    )
    parser.add_argument("--small", action="store_true", help="a tower of 6 layers and few image sizes")
    parser.add_argument(
        "--timed-steps", type=int, default=10, metavar="N", help="last steps of a run that are timed; 0: none"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when runs that have not ended are ended")
    parser.add_argument("--gpus", type=int, help="GPUs to use; all without it")
    parser.add_argument(
        "--ranks-per-gpu",
        type=int,
        default=1,
        metavar="N",
        help="ranks that may share a GPU, without times, in layouts of more ranks than there are GPUs; 1 without it",
    )
    parser.add_argument("--dry-run", action="store_true", help="print when which runs go on which GPUs, and end")
    parser.add_argument("--logs", type=Path, help="folder for the runs' output; without it, it goes to this one's")
    parser.add_argument("--out", type=Path, help="file of records; docs/benchmarks/parallel.jsonl without it")
    args = parser.parse_args(words)
    if not 1 <= args.ranks_per_gpu <= MOST_RANKS_PER_GPU:
        parser.error(f"Cannot use --ranks-per-gpu {args.ranks_per_gpu}: it must be 1 to {MOST_RANKS_PER_GPU}.")
    for option, least in (("eager_runs", FEWEST_EAGER_RUNS), ("timed_steps", 0), ("steps", 1), ("microbatches", 1)):
        value = getattr(args, option)
        if value < least:
            parser.error(f"Cannot use --{option.replace('_', '-')} {value}: it must be {least} or more.")
    return args


if __name__ == "__main__":
    sys.exit(main())
