"""The command `bridge-cg`."""

import argparse
import difflib
import importlib
import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import NoReturn

from bridge_cg_plugin import __version__
from bridge_cg_plugin.options import OptionError

from .answers import AnswerError, Tell, answer_alone, open_closed, say
from .explain import command as explained
from .explain import recipes as explained_recipes
from .planner import command as planner
from .report import page as reports

# Commands with a parser of their own, and the names of their modules.
TRAINING = ("train", "compare")
# How alike a word and a choice are at least, to be misspelt: a100 and h100 are two GPUs.
SPELLING = 0.8


class Parser(argparse.ArgumentParser):
    """A parser that names the nearest of the choices that a word is none of."""

    def error(self, message: str) -> NoReturn:
        """End the process with what cannot be used, and the nearest word that can."""
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        choices = re.findall(r"[\w-]+", wrong[2]) if wrong else []
        near = difflib.get_close_matches(wrong[1], choices, n=1, cutoff=SPELLING) if wrong else []
        super().error(f"{message}. Did you mean {near[0]}?" if near else message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    1 where `doctor` found a problem, `audit` a drift or `compare` a run that failed or differs, 2 for input that is
    refused and an answer that cannot be written.
    """
    open_closed()
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments), lasting=arguments is None)
    except (AnswerError, OptionError) as error:
        print(error, file=sys.stderr)
        return 2


def _run(given: Sequence[str], lasting: bool) -> int:
    if given[:1] and given[0] in TRAINING:
        module = importlib.import_module(f"bridge_cg_plugin.cli.runs.{given[0]}")
        status: int = module.main(given[1:])
        return status
    first = "First: bridge-cg doctor, then bridge-cg explain RECIPE cuda_graphs=exact"
    parser = Parser(prog="bridge-cg", description="CUDA graphs for training on Megatron-Bridge", epilog=first)
    parser.add_argument("--version", action="version", version=f"bridge-cg {__version__}")
    commands = parser.add_subparsers(dest="command")
    doctor = commands.add_parser("doctor", help="say what the plugin finds here and what to do about problems")
    doctor.add_argument("--no-gpu", action="store_true", help="a machine without a GPU is no problem")
    doctor.add_argument(
        "--details", action="store_true", help="wait until Bridge was imported, and name every seam and feature"
    )
    commands.add_parser("train", help="train a recipe of Bridge or a preset, with graph flags; train --help has them")
    commands.add_parser("compare", help="train a recipe eager and on graphs, and say whether both train the same")
    listing = commands.add_parser("recipes", help="list the presets with graphs and Bridge's recipes")
    listing.add_argument("filter", nargs="?", default="", help="part of a name; without one the families are counted")
    listing.add_argument("--all", action="store_true", help="also benchmarks for numbers of GPUs")
    audit = commands.add_parser("audit", help="compare what the plugin expects with a release, without importing it")
    audit.add_argument(
        "sources",
        nargs="*",
        default=["installed"],
        metavar="WHEEL|FOLDER|installed",
        help="together one release (megatron-bridge and megatron-core); what is installed if left out",
    )
    explain = commands.add_parser(
        "explain", allow_abbrev=False, help="print what runs on graphs, why, and what to expect of it"
    )
    explained.add_arguments(explain)
    report = commands.add_parser("report", help="show what training runs did: losses, times, memory, graphs, parity")
    reports.add_arguments(report)
    plans = planner.add_arguments(commands.add_parser("plan", help="recommend graph options from a dataset's sizes"))
    for command in (doctor, audit, report, listing):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    if given in ([], ["help"]):
        parser.print_help()
        return 0
    args, rest = parser.parse_known_args(given)
    if args.command is None:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest and args.command != "explain":
        chosen = plans[args.kind] if args.command == "plan" else commands.choices[args.command]
        known = re.findall(r"--[\w-]+", chosen.format_help())
        near = difflib.get_close_matches(rest[0].partition("=")[0], known, n=1)
        parser.error(f"unrecognized arguments: {' '.join(rest)}" + (f". Did you mean {near[0]}?" if near else ""))
    alone = args.json or args.command in ("explain", "doctor")  # libraries print
    if args.command == "doctor" and sys.stderr.isatty():
        print("doctor looks at releases, sources and PyTorch: about ten seconds", file=sys.stderr)
    with answer_alone(lasting) if alone else nullcontext(say) as tell:
        if args.command == "explain":
            return explained.run(given[given.index("explain") + 1 :], tell)
        return RUNS[args.command](args, tell)


def _doctor(args: argparse.Namespace, tell: Tell) -> int:
    from .doctor import diagnose, render

    found = diagnose(not args.no_gpu, args.details)
    tell(json.dumps(asdict(found)) if args.json else render(found, args.details))
    return 1 if found.problems else 0


def _audit(args: argparse.Namespace, tell: Tell) -> int:
    from .audit import audit, render

    found = audit(args.sources)
    tell(json.dumps(asdict(found)) if args.json else render(found))
    return 1 if found.drift else 0


RUNS = dict(report=reports.run_report, plan=planner.run, recipes=explained_recipes.run, audit=_audit, doctor=_doctor)


if __name__ == "__main__":
    sys.exit(main())
