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
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.answers import answered, say
from bridge_cg_plugin.cli.report.page import Page, make_page, to_terminal, write_page
from bridge_cg_plugin.cli.report.runs import WARM_UP
from bridge_cg_plugin.cli.report.sources import runs_in
from bridge_cg_plugin.cli.runs import first_look
from bridge_cg_plugin.cli.runs.first_look import with_package
from bridge_cg_plugin.cli.runs.recipe import error_in, free_port, read, require_gpu, torchrun
from bridge_cg_plugin.cli.runs.recorded_run import KINDS
from bridge_cg_plugin.cli.runs.results import command_line, provenance, write_records
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.options.flags import as_typed, take_flags
from bridge_cg_plugin.options.graph_options import SETTING
from bridge_cg_plugin.options.language_model import IMPL
from bridge_cg_plugin.options.packed import PACKED_FIELDS
from bridge_cg_plugin.options.sources import ATTRIBUTES, FIELDS, LANGUAGE_MODEL_FIELDS
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS
from bridge_cg_plugin.upstream.hooks.recipes import LANGUAGE_MODEL_STEP, step_name

WORKER, RECIPE = (Path(__file__).with_name(name) for name in ("recorded_run.py", "train.py"))
ITERATIONS = "train.train_iters"
# What upstream's vision graphs compute instead of the tower.
WRONG = "computes another function: no rotary embedding, attention across images"
VISION_IMPL, LENGTH = PROVIDER_FIELDS["impl"], PROVIDER_FIELDS["max_seq_length"]
_LAST_LINES = 200


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run that is to be made.

    Attributes:
        mode: Its name: eager1, eager2, ..., upstream or plugin.
        kind: Of `KINDS`.
        command: What starts it, without where its record goes.
        wrong: What the run computes instead of the model, empty where it computes the model.
    """

    mode: str
    kind: str
    command: tuple[str, ...]
    wrong: str = ""


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
    chosen = [kind for kind in args.modes.split(",") if kind]
    if not chosen or not set(chosen) <= set(KINDS):
        raise OptionError("modes", args.modes, f"any of {', '.join(KINDS)}, comma-separated", "Correct the name.")
    recipe, words = read(["--recipe", args.recipe, *rest])
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
                return answered(*(f"{run.mode}: {shlex.join(run.command)}" for run in runs))
            require_gpu()
            refused = refusal(plugins)
        if refused:
            print(refused, file=sys.stderr)
            return 2
        _make_folder(args.out)
    except OptionError as error:
        print(as_typed(error, given), file=sys.stderr)
        return 2
    records = make_runs(runs, args)
    with contextlib.redirect_stdout(sys.stderr):  # what importing the stack says
        page = _write(records, args.out)
    say(to_terminal(page), f"page: {args.out / 'page.md'}")
    failed = any(run.error for run in page.runs if run.mode != "upstream")  # which may fail or differ
    differs = any(verdict.state != "same" for verdict in page.verdicts if verdict.mode == "plugin")
    return 1 if failed or differs else 0


def plan(args: argparse.Namespace, rest: Sequence[str]) -> list[PlannedRun]:
    """Return the runs in the order in which they are made."""
    images, found = _takes_images(args, rest), []
    for kind in (kind for kind in KINDS if kind in args.modes.split(",")):
        start = torchrun(args.gpus_per_node) if args.gpus_per_node > 1 else [sys.executable]
        words = ["--recipe", args.recipe, *words_of(kind, rest, images), f"{ITERATIONS}={args.steps}"]
        command = (*start, str(WORKER), "--as", kind, *words)
        modes = [f"eager{i + 1}" for i in range(args.eager_runs)] if kind == "eager" else [kind]
        wrong = WRONG if kind == "upstream" and images else ""
        found += [PlannedRun(mode, kind, command, wrong) for mode in modes]
    return found


def _takes_images(args: argparse.Namespace, rest: Sequence[str]) -> bool:
    """Return whether the recipe's model takes images, so that its vision encoder can be on graphs."""
    step = read(["--recipe", args.recipe, *rest])[0].step_func or step_name(args.recipe)
    return step != LANGUAGE_MODEL_STEP


def words_of(kind: str, rest: Sequence[str], images: bool) -> list[str]:
    """Return the words of `bridge-cg train` for one kind of run: graph options are for the plugin's.

    Args:
        kind: Of `KINDS`.
        rest: The words that were given.
        images: Whether the model takes images.
    """
    if kind == "plugin":
        return [f"--{SETTING}", "exact", *rest]
    flags, others = take_flags(rest)
    graph_words = {word: _field_of(word) for word in others if _field_of(word) in (*FIELDS, *ATTRIBUTES)}
    plain = [word for word in others if word not in graph_words]
    without_packs = f"{PACKED_FIELDS['max_packed_seqs']}=null"
    if kind == "eager":
        return [f"--{VISION_IMPL}", "none", f"--{IMPL}", "none", without_packs, *plain]
    # Upstream's own fields; the language model's are those of the recipe and the words.
    vision = [f"--{VISION_IMPL}", "transformer_engine"] if images else []
    kept = (*LANGUAGE_MODEL_FIELDS, LENGTH)
    own = [word for name, value in flags.items() if name in kept for word in (f"--{name}", str(value))]
    own += [word for word, field in graph_words.items() if field in kept]
    return [f"--{SETTING}", "null", *vision, *own, without_packs, *plain]


def _field_of(word: str) -> str:
    """Return the field that an override sets, without `model.` and Hydra's marks."""
    return word.partition("=")[0].lstrip("+~").removeprefix("model.")


def plugins_command(args: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """Return the command line of `bridge-cg train` for the plugin's run."""
    plugins = words_of("plugin", rest, _takes_images(args, rest))
    start = ["--launcher", "torchrun", "--gpus_per_node", str(args.gpus_per_node)]
    return ["--recipe", args.recipe, *start, *plugins, f"{ITERATIONS}={args.steps}"]


def refusal(plugins: Sequence[str]) -> str:
    """Build the plugin's configuration once, in a process of its own, before anything trains.

    Returns:
        What it was refused with, in one line; empty where it was not.
    """
    command = [sys.executable, str(RECIPE), *plugins, "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, env=with_package())
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"bridge-cg train ended with status {done.returncode}"]
    return next((line for line in lines if line.startswith("Cannot ")), lines[-1])


def _make_folder(out: Path) -> None:
    """Make the folder of what is written.

    Raises:
        OptionError: Nothing can be written there.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OptionError.because("out", f"Cannot write to --out {out}: {error.strerror}.") from None


def make_runs(runs: Sequence[PlannedRun], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Make every run and return their records; one that failed has its error."""
    records: list[dict[str, Any]] = []
    environment = {"MASTER_PORT": str(free_port()), **with_package()}  # Bridge's default may be another job's
    with tempfile.TemporaryDirectory() as folder:
        for number, run in enumerate(runs, 1):
            file, log = Path(folder) / f"{run.mode}.json", args.out / f"{run.mode}.log"
            began = time.monotonic()
            print(f"{run.mode} ({number} of {len(runs)}): steps are in {log}", flush=True)
            error = run_to_end([*run.command, "--record", str(file)], log, args.time_limit, environment)
            if not error and not file.exists():
                error = "the process ended well and wrote no record"
            measured = {"error": error} if error else json.loads(file.read_text())
            wrong = {"wrong": run.wrong} if run.wrong else {}
            records.append({"case": args.recipe, "mode": run.mode, **wrong, **measured})
            said = f"failed: {error}" if error else f"{measured['ms']:.1f} ms a step"
            print(f"{run.mode}: {said} ({time.monotonic() - began:.0f} s)", flush=True)
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
    page = make_page(runs_in(path), f"{whole[0]['case']}: eager, upstream's graphs and the plugin")
    write_page(page, markdown=out / "page.md", json=out / "page.json")
    return page


if __name__ == "__main__":
    sys.exit(main())
