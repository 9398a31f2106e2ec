"""Train any recipe of Bridge or preset of the plugin, with graph flags and then `section.name=value` overrides.

    python scripts/performance/run_recipe.py --recipe qwen3_vl_8b_vision_graphs_h200_pretrain_mock_config --dry-run
    torchrun --nproc_per_node=4 scripts/performance/run_recipe.py --recipe qwen3_vl_8b_pretrain_mock_config \
        --vision_cuda_graph_impl transformer_engine --max_vision_cuda_graph_seq_length 16384 train.train_iters=50

Flags are applied first, overrides after them in the order of the command line: later ones win. `--dry-run` prints what
all of it resolves to. Exit status 2 means refused input; the reason is on standard error.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import bridge_cg_plugin  # noqa: E402
from bridge_cg_plugin.options import OptionError, normalize  # noqa: E402
from bridge_cg_plugin.options.explain import in_words  # noqa: E402
from bridge_cg_plugin.options.flags import FLAGS, add_flags, given_flags, unknown_flag  # noqa: E402
from bridge_cg_plugin.recipes import GPUS, with_graphs  # noqa: E402
from bridge_cg_tools.launch import LAUNCHERS, Job, slurm, torchrun  # noqa: E402

_JOB = ("nodes", "gpus_per_node", "account", "partition", "time", "experiment_name", "container_image", "mount", "env")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that can start.

    Attributes:
        config: Bridge's configuration with everything applied.
        mode: "pretrain" or "finetune".
        step: Name of the forward step.
        forward_step: The forward step.
        summary: The resolved options, in words.
    """

    config: Any
    mode: str
    step: str
    forward_step: Any
    summary: str


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="run_recipe.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run = parser.add_argument_group("run")
    run.add_argument("--recipe", required=True, metavar="NAME", help="a recipe's or preset's name")
    run.add_argument(
        "--graphs", choices=tuple(GPUS), help="vision graphs within the limits of this GPU, on any recipe of Bridge"
    )
    run.add_argument("--mock_data", "--mock-data", action="store_true", help="train on Bridge's mock images")
    run.add_argument("--mode", choices=("pretrain", "finetune"), help="how to train; by the name if left out")
    run.add_argument("--step_func", "--step-func", metavar="STEP", help="forward step; by the name if left out")
    run.add_argument("--dry-run", "--dry_run", action="store_true", help="print what the input resolves to and exit")
    add_flags(parser)
    start = parser.add_argument_group("launch")
    start.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default="none",
        help="none: this process is the worker (alone, or under torchrun or srun); torchrun: start workers here; "
        "slurm: submit through NeMo-Run",
    )
    start.add_argument("--nodes", type=int, default=1, metavar="N", help="machines, with slurm")
    start.add_argument("--gpus_per_node", "--gpus-per-node", type=int, default=1, metavar="N", help="workers on each")
    start.add_argument("--account", metavar="NAME", help="SLURM account")
    start.add_argument("--partition", metavar="NAME", help="SLURM partition")
    start.add_argument("--time", default="01:00:00", metavar="HH:MM:SS", help="SLURM time limit")
    start.add_argument(
        "--experiment_name", "--experiment-name", default="bridge_cg", metavar="NAME", help="name of the SLURM job"
    )
    start.add_argument("--container_image", "--container-image", metavar="IMAGE", help="container of the SLURM job")
    start.add_argument("--mount", action="append", default=[], metavar="A:B", help="path mounted into the container")
    start.add_argument("--env", action="append", default=[], metavar="K=V", help="environment variable of the workers")
    return parser


def read(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return parsed flags and the overrides after them.

    Raises:
        OptionError: A flag does not exist, or its value alone cannot work. Nothing of upstream was imported.
    """
    parser = build_parser()
    parsed, words = parser.parse_known_args(arguments)
    for word in words:
        if word.startswith("-"):
            known = [spelling for flag in FLAGS for spelling in flag.spellings]
            raise unknown_flag(word, [*known, *(f"--{name}" for name in vars(parsed))])
    normalize(given_flags(parsed))
    return parsed, words


def prepare(parsed: argparse.Namespace, words: Sequence[str]) -> Prepared:
    """Build the recipe and apply everything to it.

    Raises:
        OptionError: There is no such recipe, field or step, or the options cannot work.
    """
    bridge_cg_plugin.activate()
    from bridge_cg_plugin.upstream.hooks.overrides import apply_overrides
    from bridge_cg_plugin.upstream.hooks.recipes import build_recipe, is_benchmark
    from bridge_cg_plugin.upstream.hooks.steps import forward_step, mode_of, step_name

    config = build_recipe(parsed.recipe)
    if parsed.graphs or parsed.mock_data:
        vision = None if parsed.graphs else False
        config = with_graphs(config, gpu=parsed.graphs or next(iter(GPUS)), vision=vision, mock_data=parsed.mock_data)
    options = apply_overrides(config, given_flags(parsed), words)
    mode = parsed.mode or mode_of(parsed.recipe, is_benchmark(parsed.recipe))
    step = parsed.step_func or step_name(parsed.recipe)
    return Prepared(config, mode, step, forward_step(step, mode), in_words(options))


def train(run: Prepared, callbacks: Sequence[Any] = ()) -> None:
    """Train in this process, which torchrun or srun may have started as one of many, with Bridge training callbacks."""
    from bridge_cg_plugin.upstream.hooks.dataset_helper import helper_as_shipped
    from bridge_cg_plugin.upstream.hooks.steps import train_function

    # Bridge sets it to True, which takes the tokenizer's guard away: a forked data worker would wait for ever for
    # threads that only its parent has.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    further = {"callbacks": list(callbacks)} if callbacks else {}
    import torch

    starts_the_groups = not torch.distributed.is_initialized()
    with helper_as_shipped():
        train_function(run.mode)(config=run.config, forward_step_func=run.forward_step, **further)
    if starts_the_groups and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, 2 for input that is refused."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parsed, words = read(given)
        if parsed.launcher != "none" and not parsed.dry_run:
            start = torchrun if parsed.launcher == "torchrun" else slurm
            start(_job(parsed), str(Path(__file__).resolve()), worker_arguments(given))
            return 0
        if not parsed.dry_run:
            require_gpu()
        with contextlib.redirect_stdout(sys.stderr):  # only the answer goes to standard output
            run = prepare(parsed, words)
    except OptionError as error:
        print(error, file=sys.stderr)
        return 2
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"{parsed.recipe}: {run.mode}() with {run.step}\n{run.summary}", flush=True)
    if not parsed.dry_run:
        train(run)
    return 0


def require_gpu() -> None:
    """Refuse to train where Bridge would stop in the middle of its start.

    Raises:
        OptionError: PyTorch sees no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise OptionError("gpu", None, "an NVIDIA GPU that PyTorch sees", "Train where there is one, or add --dry-run.")


def worker_arguments(given: Sequence[str]) -> list[str]:
    """Return a command line without what only the launcher needs."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("launcher", *_JOB):
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), action="append")
    return parser.parse_known_args(list(given))[1]


def _job(parsed: argparse.Namespace) -> Job:
    for variable in parsed.env:
        if "=" not in variable:
            raise OptionError("env", variable, "NAME=VALUE", "Correct it.")
    return Job(
        nodes=parsed.nodes,
        gpus_per_node=parsed.gpus_per_node,
        account=parsed.account,
        partition=parsed.partition,
        time=parsed.time,
        name=parsed.experiment_name,
        container_image=parsed.container_image,
        mounts=tuple(parsed.mount),
        environment=dict(variable.split("=", 1) for variable in parsed.env),
    )


if __name__ == "__main__":
    sys.exit(main())
