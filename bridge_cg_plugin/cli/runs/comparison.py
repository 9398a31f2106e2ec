"""A recipe trained eager, with upstream's vision graphs and with the plugin: the runs, their records and their page."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.report.command import write_page
from bridge_cg_plugin.cli.report.page import Page, make_page
from bridge_cg_plugin.cli.report.records import runs_in
from bridge_cg_plugin.cli.runs import first_look, recipe_arguments
from bridge_cg_plugin.cli.runs.first_look import with_package
from bridge_cg_plugin.cli.runs.recipe import free_port
from bridge_cg_plugin.cli.runs.recorded import KINDS
from bridge_cg_plugin.cli.runs.results import command_line, provenance, write_records
from bridge_cg_plugin.cli.runs.watched import Watch, run_watched
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.options.choice import SETTING
from bridge_cg_plugin.options.flags import take_flags
from bridge_cg_plugin.options.language_model import IMPL
from bridge_cg_plugin.options.packed import PACKED_FIELDS
from bridge_cg_plugin.options.sources import ATTRIBUTES, FIELDS, LANGUAGE_MODEL_FIELDS
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS
from bridge_cg_plugin.upstream.hooks.loops.steps import LANGUAGE_MODEL_STEP, step_name

WORKER, RECIPE = (Path(__file__).with_name(name) for name in ("recorded_run.py", "train.py"))
ITERATIONS = "train.train_iters"
# What upstream's vision graphs compute instead of the tower.
WRONG = "computes another function: no rotary embedding, attention across images"
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
    step = recipe_arguments.read(["--recipe", args.recipe, *rest])[0].step_func or step_name(args.recipe)
    return step != LANGUAGE_MODEL_STEP


def launcher(gpus: int) -> tuple[str, ...]:
    """Return what a run's script is started by."""
    alone = (sys.executable,)
    return alone if gpus == 1 else (*alone, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}")


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
    graph_words = {word: field_of(word) for word in others if field_of(word) in (*FIELDS, *ATTRIBUTES)}
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


def field_of(word: str) -> str:
    """Return the field that an override sets, without `model.` and Hydra's marks."""
    return word.partition("=")[0].lstrip("+~").removeprefix("model.")


def refusal(args: argparse.Namespace, rest: Sequence[str]) -> str:
    """Build the plugin's configuration once, in a process of its own, before anything trains.

    Returns:
        What it was refused with, in one line; empty where it was not.
    """
    words = [*_plugins_command(args, rest), "--dry-run"]
    done = subprocess.run([sys.executable, str(RECIPE), *words], capture_output=True, text=True, env=with_package())
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"bridge-cg train ended with status {done.returncode}"]
    return next((line for line in lines if line.startswith("Cannot ")), lines[-1])


def refused_at_once(args: argparse.Namespace, rest: Sequence[str]) -> str:
    """Return what the plugin's run is refused with, in about two seconds; empty where it is not."""
    return first_look.refusal(_plugins_command(args, rest))


def _plugins_command(args: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    plugins = words_of("plugin", rest, takes_images(args, rest))
    start = ["--launcher", "torchrun", "--gpus_per_node", str(args.gpus_per_node)]
    return ["--recipe", args.recipe, *start, *plugins, f"{ITERATIONS}={args.steps}"]


def make_folder(out: Path) -> None:
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


def make_runs(runs: Sequence[PlannedRun], args: argparse.Namespace, watch: Watch) -> list[dict[str, Any]]:
    """Make every run and return their records; one that failed has its error."""
    records: list[dict[str, Any]] = []
    environment = {"MASTER_PORT": str(free_port()), **with_package()}  # Bridge's default may be another job's
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
    whole = [{**provenance(0, 0), **record, "command": command_line()} for record in records]
    path = out / "compare.jsonl"
    write_records(path, whole)
    page = make_page(runs_in(path), f"{whole[0]['case']}: eager, upstream's graphs and the plugin")
    write_page(page, markdown=out / "page.md", json=out / "page.json")
    return page


def status_of(page: Page) -> int:
    """Return the exit status: upstream's run may fail or differ, the others may not."""
    failed = any(run.error for run in page.runs if run.mode != "upstream")
    differs = any(verdict.state != "same" for verdict in page.verdicts if verdict.mode == "plugin")
    return 1 if failed or differs else 0
