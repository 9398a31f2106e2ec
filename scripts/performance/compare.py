"""Train a recipe eager, with upstream's vision graphs and with the plugin, and write one page about all runs.

    python scripts/performance/compare.py --recipe qwen3_vl_8b_vision_graphs_h200_pretrain_mock_config \
        --gpus_per_node 4 --steps 30 --out runs/compare train.global_batch_size=8
    python scripts/performance/compare.py --recipe NAME --dry-run

Flags and `section.name=value` overrides are those of run_recipe.py; graph options among them are for the plugin's run.
Each run has a process of its own. One that fails is shown with its error, and the others go on. Eager runs at least
twice: the plugin's run is held against what eager runs differ by. Into the folder go page.html, page.md, page.json,
compare.jsonl and a log of each run. Exit status: 1 where an eager run or the plugin's failed, or the plugin's was not
shown to train what eager trains; 2 for input that is refused.
"""

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.options import OptionError  # noqa: E402
from bridge_cg_plugin.options.flags import take_flags  # noqa: E402
from bridge_cg_plugin.options.language_model import IMPL  # noqa: E402
from bridge_cg_plugin.options.packed import PACKED_FIELDS  # noqa: E402
from bridge_cg_plugin.options.sources import ATTRIBUTES, FIELDS, LANGUAGE_MODEL_FIELDS  # noqa: E402
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS  # noqa: E402
from bridge_cg_plugin.upstream.hooks.steps import LANGUAGE_MODEL_STEP, step_name  # noqa: E402
from bridge_cg_tools.report import plots  # noqa: E402
from bridge_cg_tools.report.command import print_page, write_page  # noqa: E402
from bridge_cg_tools.report.page import Page, make_page  # noqa: E402
from bridge_cg_tools.report.records import read_records  # noqa: E402
from bridge_cg_tools.report.runs import WARM_UP  # noqa: E402
from examples.photographs.processes import free_port  # noqa: E402
from scripts.performance import run_recipe  # noqa: E402
from scripts.performance.bench_step import WRONG  # noqa: E402
from scripts.performance.recorded_run import KINDS  # noqa: E402
from scripts.performance.watched import Watch, run_watched  # noqa: E402

WORKER = Path(__file__).with_name("recorded_run.py")
RECIPE_SCRIPT = Path(__file__).with_name("run_recipe.py")
ITERATIONS = "train.train_iters"
VISION_IMPL, LENGTH = PROVIDER_FIELDS["impl"], PROVIDER_FIELDS["max_seq_length"]


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
    """Return the command line of what is not run_recipe.py's."""
    parser = argparse.ArgumentParser(
        prog="compare.py",
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
    """Return this script's arguments and the other words, which go to run_recipe.py.

    Raises:
        OptionError: A value cannot work, or run_recipe.py has no such flag.
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
    recipe, words = run_recipe.read(["--recipe", args.recipe, *rest])
    if recipe.launcher != "none":
        raise OptionError("launcher", recipe.launcher, "none", "Runs start here, on --gpus_per_node GPUs each.")
    for word in (word for word in words if _field(word) == ITERATIONS):
        raise OptionError(ITERATIONS, word.partition("=")[2], "what --steps says", "Write --steps instead.")
    return args, rest


def plan(args: argparse.Namespace, rest: Sequence[str]) -> list[PlannedRun]:
    """Return the runs in the order in which they are made."""
    kinds = [kind for kind in KINDS if kind in args.modes.split(",")]
    images, found = takes_images(args, rest), []
    for kind in kinds:
        words = ["--recipe", args.recipe, *words_of(kind, rest, images), f"{ITERATIONS}={args.steps}"]
        command = (*launcher(args.gpus_per_node), str(WORKER), "--as", kind, *words)
        modes = [f"eager{i + 1}" for i in range(args.eager_runs)] if kind == "eager" else [kind]
        wrong = WRONG if kind == "upstream" and images else ""
        found += [PlannedRun(mode, kind, command, wrong) for mode in modes]
    return found


def takes_images(args: argparse.Namespace, rest: Sequence[str]) -> bool:
    """Return whether the recipe's model takes images, so that its vision encoder can be on graphs."""
    step = run_recipe.read(["--recipe", args.recipe, *rest])[0].step_func or step_name(args.recipe)
    return step != LANGUAGE_MODEL_STEP


def launcher(gpus: int) -> tuple[str, ...]:
    """Return what a run's script is started by."""
    alone = (sys.executable,)
    return alone if gpus == 1 else (*alone, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}")


def words_of(kind: str, rest: Sequence[str], images: bool) -> list[str]:
    """Return run_recipe.py's words for one kind of run: graph options are for the plugin's.

    Args:
        kind: Of `KINDS`.
        rest: The words that were given.
        images: Whether the model takes images; a language model's graphs are those of its recipe and flags.
    """
    vision = [f"--{VISION_IMPL}", "transformer_engine"] if images else []
    if kind == "plugin":
        return [*vision, *rest]
    flags, others = take_flags(rest)
    graph_words = {word: _field(word) for word in others if _field(word) in (*FIELDS, *ATTRIBUTES)}
    plain = [word for word in others if word not in graph_words]
    without_packs = [] if images else [f"{PACKED_FIELDS['max_packed_seqs']}=null"]
    if kind == "eager":
        return [f"--{VISION_IMPL}", "none", f"--{IMPL}", "none", *without_packs, *plain]
    # Upstream's own fields; the language model as in the plugin's run.
    kept = (*LANGUAGE_MODEL_FIELDS, LENGTH)
    own = [word for name, value in flags.items() if name in kept for word in (f"--{name}", str(value))]
    own += [word for word, field in graph_words.items() if field in kept]
    return [*vision, *own, *without_packs, *plain]


def _field(word: str) -> str:
    return word.partition("=")[0].lstrip("+~").removeprefix("model.")


def refusal(args: argparse.Namespace, rest: Sequence[str]) -> str:
    """Build the plugin's configuration once, in a process of its own, before anything trains.

    Returns:
        What it was refused with, in one line; empty where it was not.
    """
    plugins = words_of("plugin", rest, takes_images(args, rest))
    words = ["--recipe", args.recipe, *plugins, f"{ITERATIONS}={args.steps}", "--dry-run"]
    done = subprocess.run([sys.executable, str(RECIPE_SCRIPT), *words], capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"run_recipe.py ended with status {done.returncode}"]
    return next((line for line in lines if ": allowed is " in line), lines[-1])


def make_runs(runs: Sequence[PlannedRun], args: argparse.Namespace, watch: Watch) -> list[dict[str, Any]]:
    """Make every run and return their records; one that failed has its error."""
    records: list[dict[str, Any]] = []
    environment = {"MASTER_PORT": str(free_port()), **os.environ}  # Bridge's default may be another job's
    with tempfile.TemporaryDirectory() as folder:
        for run in runs:
            file = Path(folder) / f"{run.mode}.json"
            log = args.out / f"{run.mode}.log"
            with watch.run(run.mode):
                command = [*run.command, "--record", str(file)]
                error = run_watched(command, log, args.time_limit, watch.step, environment)
            if not error and not file.exists():
                error = "the process ended well and wrote no record"
            measured = {"error": error} if error else json.loads(file.read_text())
            wrong = {"wrong": run.wrong} if run.wrong else {}
            records.append({"case": args.recipe, "mode": run.mode, **wrong, **measured})
            watch.finished(run.mode, records[-1])
    return records


def write(records: Sequence[dict[str, Any]], out: Path) -> Page:
    """Write the records and the page of them; returns the page."""
    from scripts.performance.results import check_record, command_line, provenance, write_records

    whole = [{**provenance(0, 0), **record, "command": command_line()} for record in records]
    for record in whole:
        check_record(record)
    path = out / "compare.jsonl"
    write_records(path, whole)
    page = make_page(read_records(path), f"{whole[0]['case']}: eager, upstream's graphs and the plugin")
    write_page(page, html=out / "page.html", markdown=out / "page.md", json=out / "page.json")
    return page


def status_of(page: Page) -> int:
    """Return the exit status: upstream's run may fail or differ, the others may not."""
    failed = any(run.error for run in page.runs if run.mode != "upstream")
    differs = any(verdict.state != "same" for verdict in page.verdicts if verdict.mode == "plugin")
    return 1 if failed or differs else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        args, rest = read(arguments)
        runs = plan(args, rest)
        if args.dry_run:
            print("\n".join(f"{run.mode}: {shlex.join(run.command)}" for run in runs))
            return 0
        plots.require()
        run_recipe.require_gpu()
    except OptionError as error:
        print(error, file=sys.stderr)
        return 2
    refused = refusal(args, rest)
    if refused:
        print(refused, file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    records = make_runs(runs, args, Watch([run.mode for run in runs], args.steps))
    with contextlib.redirect_stdout(sys.stderr):  # what importing the stack says
        page = write(records, args.out)
    print_page(page)
    print(f"page: {args.out / 'page.html'}")
    return status_of(page)


if __name__ == "__main__":
    sys.exit(main())
