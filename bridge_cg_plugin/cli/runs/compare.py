r"""Train a recipe eager and on graphs, and write one page about all runs.

    bridge-cg compare qwen3_vl_8b_vision_graphs_h200_pretrain_mock_config \
        --gpus_per_node 4 --steps 30 train.global_batch_size=8
    bridge-cg compare NAME --dry-run

Flags and `section.name=value` overrides are those of `bridge-cg train`; graph
options among them are for the plugin's run. Each run has a process of its
own. One that fails is shown with its error, and the others go on. The
plugin's run is held against what eager runs differ by. Into the folder go
page.md, page.json, compare.jsonl and a log of each run. Exit status: 1 where
a run failed, or the plugin's was not shown to train what eager trains; 2 for
input that is refused.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.answers import say
from bridge_cg_plugin.cli.report.page import Page, make_page, to_json, to_markdown, to_terminal, write
from bridge_cg_plugin.cli.report.runs import WARM_UP
from bridge_cg_plugin.cli.report.sources import runs_in
from bridge_cg_plugin.cli.runs import first_look
from bridge_cg_plugin.cli.runs.first_look import with_package
from bridge_cg_plugin.cli.runs.recipe import error_in, free_port, read, require_gpu, torchrun
from bridge_cg_plugin.cli.runs.results import command_line, provenance, write_records
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.options.flags import take_flags
from bridge_cg_plugin.options.graph_options import SETTING
from bridge_cg_plugin.options.language_model import IMPL
from bridge_cg_plugin.options.packed import PACKED_FIELDS
from bridge_cg_plugin.options.sources import FIELDS
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS

RECIPE = Path(__file__).with_name("train.py")
ITERATIONS = "train.train_iters"
PLUGIN = "plugin"
_LAST_LINES = 200


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of what is not `bridge-cg train`'s."""
    parser = argparse.ArgumentParser(
        prog="bridge-cg compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", metavar="NAME", help="a recipe's or preset's name, which may also stand alone")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help=f"steps; the first {WARM_UP} are not timed")
    parser.add_argument("--eager_runs", "--eager-runs", type=int, default=3, metavar="N", help="eager runs, 2 or more")
    parser.add_argument("--gpus_per_node", "--gpus-per-node", type=int, default=1, metavar="N", help="GPUs of a run")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), metavar="FOLDER", help="where all of it goes")
    parser.add_argument(
        "--time_limit", "--time-limit", type=float, default=3600, metavar="S", help="seconds after which a run is ended"
    )
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="print the commands and exit")
    return parser


def read_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
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
    recipe, words = read([*([] if args.recipe is None else ["--recipe", args.recipe]), *rest])
    args.recipe, rest = recipe.recipe, [word for word in rest if word.lower() != recipe.recipe]
    if recipe.launcher != "none":
        raise OptionError("launcher", recipe.launcher, "none", "Runs start here, on --gpus_per_node GPUs each.")
    for word in (word for word in words if _field_of(word) == ITERATIONS):
        raise OptionError(ITERATIONS, word.partition("=")[2], "what --steps says", "Write --steps instead.")
    return args, rest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        args, rest = read_arguments(given)
        runs, plugins = plan(args, rest), plugins_command(args, rest)
        if not (refused := first_look.refusal(plugins)):
            if args.dry_run:
                say(*(f"{mode}: {shlex.join(command)}" for mode, command in runs.items()))
                return 0
            require_gpu()
            refused = refusal(plugins)
        if refused:
            print(refused, file=sys.stderr)
            return 2
    except OptionError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"Cannot write to --out {args.out}: {error.strerror}.", file=sys.stderr)
        return 2
    records = make_runs(runs, args)
    with contextlib.redirect_stdout(sys.stderr):  # what importing the stack says
        page = _write(records, args.out)
    say(to_terminal(page), f"page: {args.out / 'page.md'}")
    failed = any(run.error for run in page.runs)
    return 1 if failed or any(verdict.state != "same" for verdict in page.verdicts) else 0


def plan(args: argparse.Namespace, rest: Sequence[str]) -> dict[str, list[str]]:
    """Return what starts each run, without where its record goes, in the order in which they are made."""
    start = torchrun(args.gpus_per_node) if args.gpus_per_node > 1 else [sys.executable]
    words = {**{f"eager{i + 1}": eager_words(rest) for i in range(args.eager_runs)}, PLUGIN: plugin_words(rest)}
    steps = f"{ITERATIONS}={args.steps}"
    return {mode: [*start, str(RECIPE), "--recipe", args.recipe, *each, steps] for mode, each in words.items()}


def plugin_words(rest: Sequence[str]) -> list[str]:
    """Return the words of `bridge-cg train` for the plugin's run."""
    return [f"--{SETTING}", "exact", *rest]


def eager_words(rest: Sequence[str]) -> list[str]:
    """Return the words of `bridge-cg train` for an eager run: graph options among them are left out."""
    others = [word for word in take_flags(rest)[1] if _field_of(word) not in FIELDS]
    packs = f"{PACKED_FIELDS['max_packed_seqs']}=null"
    return [f"--{PROVIDER_FIELDS['impl']}", "none", f"--{IMPL}", "none", packs, *others]


def _field_of(word: str) -> str:
    """Return the field that an override sets, without `model.` and Hydra's marks."""
    return word.partition("=")[0].lstrip("+~").removeprefix("model.")


def plugins_command(args: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Return the command line of `bridge-cg train` for the plugin's run."""
    start = ["--launcher", "torchrun", "--gpus_per_node", str(args.gpus_per_node)]
    return ["--recipe", args.recipe, *start, *plugin_words(rest), f"{ITERATIONS}={args.steps}"]


def refusal(plugins: Sequence[str]) -> str:
    """Build the plugin's configuration once, in a process of its own, before anything trains.

    Returns:
        What it was refused with, in one line; empty where it was not.
    """
    command = [sys.executable, str(RECIPE), *plugins, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, env=with_package())
    if done.returncode == 0:
        return f"Cannot compare: {first_look.NOT_BUILT}." if first_look.NOT_BUILT in done.stdout else ""
    lines = done.stderr.strip().splitlines() or [f"bridge-cg train ended with status {done.returncode}"]
    return next((line for line in lines if line.startswith("Cannot ")), lines[-1])


def make_runs(runs: Mapping[str, Sequence[str]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Make every run and return their records; one that failed has its error."""
    records: list[dict[str, Any]] = []
    environment = {"MASTER_PORT": str(free_port()), **with_package()}  # Bridge's default may be another job's
    with tempfile.TemporaryDirectory() as folder:
        for number, (mode, command) in enumerate(runs.items(), 1):
            file, log = Path(folder) / f"{mode}.json", args.out / f"{mode}.log"
            began = time.monotonic()
            print(f"{mode} ({number} of {len(runs)}): steps are in {log}", flush=True)
            error = run_to_end([*command, "--record", str(file)], log, args.time_limit, environment)
            if not error and not file.exists():
                error = "the process ended well and wrote no record"
            measured = {"error": error} if error else json.loads(file.read_text())
            records.append({"case": args.recipe, "mode": mode, **measured})
            said = f"failed: {error}" if error else f"{measured['ms']:.1f} ms a step"
            print(f"{mode}: {said} ({time.monotonic() - began:.0f} s)", flush=True)
    return records


def run_to_end(command: Sequence[str], log: Path, limit: float, environment: Mapping[str, str]) -> str:
    """Run a command to its end and return its error in one line, empty where there was none.

    Args:
        command: The command; it gets a process group of its own.
        log: File for its output.
        limit: Seconds after which the group is ended.
        environment: Its environment variables.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        try:
            status = process.wait(limit)
        except BaseException as error:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return f"not finished after {limit:.0f} s (--time_limit)"
            raise
    if status == 0:
        return ""
    last = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    # The first line is the answer where none has an exception's name.
    said = f"the process ended with status {status}; its last line: {last[-1].strip() if last else ''}"
    return error_in("\n".join([said, *last]))


def _write(records: Sequence[dict[str, Any]], out: Path) -> Page:
    """Write the records and the page of them; returns the page."""
    whole = [{**provenance(0, 0), **record, "command": command_line()} for record in records]
    path = out / "compare.jsonl"
    write_records(path, whole)
    page = make_page(runs_in(path), f"{whole[0]['case']}: eager and the plugin")
    write(out / "page.md", to_markdown(page))
    write(out / "page.json", f"{to_json(page)}\n")
    return page


if __name__ == "__main__":
    sys.exit(main())
