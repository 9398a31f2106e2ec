"""Train a recipe eager, with upstream's vision graphs and with the plugin, and write one page about all runs.

    bridge-cg compare --recipe qwen3_vl_8b_vision_graphs_h200_pretrain_mock_config \
        --gpus_per_node 4 --steps 30 --out runs/compare train.global_batch_size=8
    bridge-cg compare --recipe NAME --dry-run

Flags and `section.name=value` overrides are those of `bridge-cg train`; graph options among them are for the plugin's
run. Each run has a process of its own. One that fails is shown with its error, and the others go on. Eager runs at
least twice: the plugin's run is held against what eager runs differ by. Into the folder go page.md, page.json,
compare.jsonl and a log of each run. Exit status: 1 where an eager run or the plugin's failed, or the
plugin's was not shown to train what eager trains; 2 for input that is refused.
"""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bridge_cg_plugin.cli.answers import answered
from bridge_cg_plugin.cli.report.command import print_page
from bridge_cg_plugin.cli.report.runs import WARM_UP
from bridge_cg_plugin.cli.runs import recipe_arguments
from bridge_cg_plugin.cli.runs.comparison import (
    ITERATIONS,
    field_of,
    make_folder,
    make_runs,
    plan,
    refusal,
    refused_at_once,
    status_of,
    write,
)
from bridge_cg_plugin.cli.runs.recipe import require_gpu
from bridge_cg_plugin.cli.runs.recorded import KINDS
from bridge_cg_plugin.cli.runs.watched import Watch
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.options.flags import as_typed


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of what is not `bridge-cg train`'s."""
    parser = argparse.ArgumentParser(
        prog="bridge-cg compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", required=True, metavar="NAME", help="a recipe's or preset's name")
    parser.add_argument("--modes", default=",".join(KINDS), metavar="LIST", help=f"comma-separated; {', '.join(KINDS)}")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help=f"steps; the first {WARM_UP} are not timed")
    parser.add_argument("--eager_runs", "--eager-runs", type=int, default=3, metavar="N", help="eager runs, 2 or more")
    parser.add_argument("--gpus_per_node", "--gpus-per-node", type=int, default=1, metavar="N", help="GPUs of a run")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), metavar="FOLDER", help="where all of it goes")
    parser.add_argument(
        "--time_limit", "--time-limit", type=float, default=3600, metavar="S", help="seconds after which a run is ended"
    )
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="print the commands and exit")
    return parser


def read(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return this command's arguments and the other words, which go to `bridge-cg train`.

    Raises:
        OptionError: A value cannot work, or `bridge-cg train` has no such flag.
    """
    args, rest = build_parser().parse_known_args(arguments)
    least = {"steps": WARM_UP + 1, "eager_runs": 2, "gpus_per_node": 1}
    for name, minimum in least.items():
        if getattr(args, name) < minimum:
            raise OptionError(name, getattr(args, name), f"a whole number of at least {minimum}", "Raise it.")
    if not args.time_limit > 0:
        raise OptionError("time_limit", args.time_limit, "a number of seconds above 0", "Raise it.")
    chosen = [kind for kind in args.modes.split(",") if kind]
    unknown = [kind for kind in chosen if kind not in KINDS]
    if unknown or not chosen:
        raise OptionError("modes", args.modes, f"any of {', '.join(KINDS)}, comma-separated", "Correct the name.")
    recipe, words = recipe_arguments.read(["--recipe", args.recipe, *rest])
    if recipe.launcher != "none":
        raise OptionError("launcher", recipe.launcher, "none", "Runs start here, on --gpus_per_node GPUs each.")
    for word in (word for word in words if field_of(word) == ITERATIONS):
        raise OptionError(ITERATIONS, word.partition("=")[2], "what --steps says", "Write --steps instead.")
    return args, rest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        args, rest = read(given)
        runs = plan(args, rest)
        if refused := refused_at_once(args, rest):
            print(refused, file=sys.stderr)
            return 2
        if args.dry_run:
            return answered(*(f"{run.mode}: {shlex.join(run.command)}" for run in runs))
        require_gpu()
        if refused := refusal(args, rest):
            print(refused, file=sys.stderr)
            return 2
        make_folder(args.out)
    except OptionError as error:
        print(as_typed(error, given), file=sys.stderr)
        return 2
    records = make_runs(runs, args, Watch([run.mode for run in runs], args.steps))
    with contextlib.redirect_stdout(sys.stderr):  # what importing the stack says
        page = write(records, args.out)
    print_page(page)
    print(f"page: {args.out / 'page.md'}")
    return status_of(page)


if __name__ == "__main__":
    sys.exit(main())
