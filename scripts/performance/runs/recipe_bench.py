"""Steps of a full-size recipe, eager and with all graphs: the runs of bench_recipe.py and their records."""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.report.kinds import KINDS
from bridge_cg_plugin.cli.report.runs import GIB, WARM_UP
from bridge_cg_plugin.cli.report.spread import compare_to_spread
from bridge_cg_plugin.cli.runs import first_look, recipe_arguments
from bridge_cg_plugin.cli.runs.comparison import words_of
from bridge_cg_plugin.cli.runs.outputs import error_in
from bridge_cg_plugin.cli.runs.results import loss_distance, provenance
from bridge_cg_plugin.options import OptionError
from scripts.performance.models.hub_folders import MODELS, variables_of
from scripts.performance.processes import TrainingFailed, TrainingProcess
from scripts.performance.runs.mock_images import MockImages
from scripts.performance.runs.recipe_cases import PROFILED

WORKER = "scripts.performance.runs.random_weights"
PLUGIN = "plugin"
# What each mode of graphs adds to the command line.
GRAPHS = {
    PLUGIN: ("--cuda_graphs=exact",),
    "plugin_vision": ("--cuda_graphs=exact", "--cuda_graph_impl", "none"),
    "plugin_fastest": ("--cuda_graphs=fastest",),
}
SEED = 1234
# Nothing is evaluated; all runs draw the same weights. Fused accumulation is Apex's, which the registry has not.
WORDS = (
    "train.eval_iters=0",
    "validation.eval_iters=0",
    "model.gradient_accumulation_fusion=false",
    f"rng.seed={SEED}",
    "rng.te_rng_tracker=true",
    "model.use_te_rng_tracker=true",
)
TIME_IS_UP = "not measured, the time was used up; give more --seconds"
FEWEST_EAGER_RUNS = 2  # that have a spread


def modes_of(eager_runs: int, graphs: Sequence[str]) -> list[str]:
    """Return the modes in the order in which they train: eager's timed run and graphs come first."""
    first, *others = (f"eager{number + 1}" for number in range(eager_runs))
    return [first, *graphs, *others]


def model_of(recipe: str) -> str:
    """Return the name on the hub of a recipe's model.

    Raises:
        OptionError: Its configuration cannot be made here.
    """
    for part, name in MODELS.items():
        if recipe.startswith(f"{part}_"):
            return name
    known = " or ".join(MODELS)
    raise OptionError("recipe", recipe, f"a recipe or preset of {known}", "Other models need their hub: compare.py.")


def words(args: argparse.Namespace, rest: Sequence[str], mode: str, checkpoint: Path) -> list[str]:
    """Return the command line of `bridge-cg train` for one run.

    Args:
        args: See `scripts/performance/bench_recipe.py`.
        rest: Further flags and overrides; graph options among them are for graphs only.
        mode: Of `modes_of`.
        checkpoint: What stands for a checkpoint, where there are adapters.
    """
    adapters = [f"checkpoint.pretrained_checkpoint={checkpoint}"] if "_peft_" in args.recipe else []
    graphs = GRAPHS.get(mode)
    given = [*graphs, *rest] if graphs else words_of("eager", rest, images=True)
    return [
        *("--recipe", args.recipe, "--mode", "pretrain", "--mock_data", *given),
        *(*adapters, *WORDS, *args.image.words()),
        *(f"train.train_iters={args.steps + PROFILED}", f"train.global_batch_size={args.global_batch}"),
    ]


def check(args: argparse.Namespace, rest: Sequence[str]) -> None:
    """Refuse a command line that no run could have.

    Raises:
        OptionError: A value cannot work.
    """
    model_of(args.recipe)
    least = {"steps": WARM_UP + 1, "eager_runs": 1, "global_batch": 1, "gpus": 1}
    for name, minimum in least.items():
        if getattr(args, name) < minimum:
            raise OptionError(name, getattr(args, name), f"a whole number of at least {minimum}", "Raise it.")
    for mode in args.modes.split(","):
        recipe_arguments.read(words(args, rest, mode, Path("checkpoint")))


def check_gpus(gpus: int, found: int) -> None:
    """Refuse more ranks than there are GPUs.

    Raises:
        OptionError: They are more.
    """
    if gpus > found:
        raise OptionError("gpus", gpus, f"at most {found}, the GPUs of this machine", "Lower it.")


def refusal(args: argparse.Namespace, rest: Sequence[str], folder: Path) -> str:
    """Return what a run with graphs would be refused with, in about two seconds; empty where it would not.

    A layout or a batch that does not fit the GPUs is, too.

    Args:
        args: See `scripts/performance/bench_recipe.py`.
        rest: Further flags and overrides.
        folder: One that exists, in the place of the checkpoint.
    """
    start = ["--launcher", "torchrun", "--gpus_per_node", str(args.gpus)]
    return first_look.refusal([*start, *words(args, rest, PLUGIN, folder)])


def case_of(args: argparse.Namespace) -> str:
    """Return the name of the case in records."""
    if args.case is not None and args.image == MockImages():
        return str(args.case)
    return f"{args.case or args.recipe.removesuffix('_config')}_{args.image}"


class Bench:
    """Runs, one after the other. Their processes import the stack side by side before that.

    Args:
        args: See `scripts/performance/bench_recipe.py`.
        rest: Further flags and overrides.
        folder: The cache of the model's files, and the runs' output.
        checkpoint: See `words`.
    """

    def __init__(self, args: argparse.Namespace, rest: Sequence[str], folder: Path, checkpoint: Path) -> None:
        self._args, self._rest, self._folder, self._checkpoint = args, rest, folder, checkpoint
        self._end = time.monotonic() + args.seconds
        self._processes: dict[str, TrainingProcess] = {}

    def start(self, modes: Sequence[str], stack: ExitStack) -> None:
        """Let the processes of runs import; they are closed with the stack."""
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **variables_of(self._folder)}
        for mode in modes:
            log = self._folder / f"{mode}.log"
            process = TrainingProcess(log, ranks=self._args.gpus, module=WORKER, environment=environment)
            stack.callback(process.close)
            self._processes[mode] = process

    def run(self, mode: str) -> dict[str, Any] | str:
        """Train once; returns what the run did, or why it did not."""
        began = time.monotonic()
        if began >= self._end:
            return TIME_IS_UP
        process = self._processes[mode]
        try:
            process.wait_until_ready()
            line = words(self._args, self._rest, mode, self._checkpoint)
            found = process.train(mode, [*line, *(["--photographs"] * (self._args.image.size is None))], self._left())
        except TrainingFailed as error:
            if time.monotonic() >= self._end:
                return TIME_IS_UP
            print(error, file=sys.stderr, flush=True)
            return error_in(str(error))
        print(f"{mode}: {time.monotonic() - began:.0f} s", flush=True)
        return found

    def _left(self) -> float | None:
        """Return the seconds that are left; None for no limit."""
        return None if self._end == float("inf") else max(self._end - time.monotonic(), 0.0)


def records_of(case: str, runs: Mapping[str, dict[str, Any] | str], steps: int, gpus: int = 1) -> list[dict[str, Any]]:
    """Return the records of all runs, beside the first eager one.

    Args:
        case: The case.
        runs: By mode: what a run did, or why it did not.
        steps: Of each run.
        gpus: Of each run.
    """
    origin = {"gpus": gpus, **provenance(steps - WARM_UP, SEED)}
    measured = {mode: run for mode, run in runs.items() if isinstance(run, dict)}
    eager = [run for mode, run in measured.items() if mode not in GRAPHS]
    found = []
    for mode, run in runs.items():
        own = {"case": case, "mode": mode, **origin}
        if isinstance(run, str):
            found.append({**own, "repeats": 0, "error": run})
            continue
        beside = _beside(run, measured.get("eager1"))
        inside = _inside(eager, run) if mode in GRAPHS else None
        found.append(
            {
                **own,
                **run,
                **_idle(run),
                **_graphs(run),
                **beside,
                **({} if inside is None else {"inside_spread": inside}),
            }
        )
    return found


def _idle(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the idle time of a step: the profiled one's, or what the median step has beside its busy time, if less.

    The profiler slows the host, so that a step that waits for it idles longer in the profile than otherwise. One that
    does not wait is shorter or longer than the median for other reasons.
    """
    if "gpu_busy_ms" not in run:
        return {}
    busy = run["gpu_busy_ms"]
    idle = min(run["parts_ms"]["idle"], max(run["ms"] - busy, 0.0))
    return {"parts_ms": {**run["parts_ms"], "idle": idle}, "idle_share": idle / (busy + idle)}


def _graphs(run: Mapping[str, Any]) -> dict[str, float]:
    """Return what all graphs of a run take: GiB of memory and seconds of capture."""
    kinds = [statistics for kind in KINDS if (statistics := run.get(kind.field)) is not None]
    if not kinds:
        return {}
    memory = sum(each["memory_bytes"] for each in kinds)
    return {"memory_gb": memory / GIB, "capture_s": float(sum(each["capture_seconds"] for each in kinds))}


def _beside(run: Mapping[str, Any], eager: Mapping[str, Any] | None) -> dict[str, float]:
    if eager is None:
        return {}
    return {"ratio": run["ms"] / eager["ms"], "loss_rel": loss_distance(run["losses"], eager["losses"])}


def _inside(eager: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> bool | None:
    """Return whether a run's losses and gradient norms stay inside the spread of eager runs; None for too few."""
    if len(eager) < FEWEST_EAGER_RUNS:
        return None
    columns = ([each[name] for each in eager] for name in ("losses", "grad_norms"))
    spreads = [
        compare_to_spread(column, run[name]) for column, name in zip(columns, ("losses", "grad_norms"), strict=True)
    ]
    return all(spread.inside for spread in spreads)


def in_words(record: Mapping[str, Any]) -> str:
    """Return one line of a record for a person."""
    if "error" in record:
        return f"{record['mode']}: {record['error']}"
    said = [f"{record['mode']}: {record['ms']:.1f} ms a step", f"peak {record['peak_gb']:.1f} GiB"]
    said += [f"ratio {record['ratio']:.3f}, losses within {record['loss_rel']:.1e}"] if "ratio" in record else []
    if "memory_gb" in record:
        said.append(f"graphs {record['memory_gb']:.1f} GiB, captured in {record['capture_s']:.1f} s")
    if "idle_share" in record:
        parts = ", ".join(f"{part} {ms:.0f}" for part, ms in record["parts_ms"].items())
        said.append(f"GPU idle {record['idle_share']:.1%} (ms: {parts})")
    else:
        said.append("no profile of its parts")
    if "inside_spread" in record:
        said.append("inside eager's spread" if record["inside_spread"] else "OUTSIDE eager's spread")
    return "; ".join(said)
