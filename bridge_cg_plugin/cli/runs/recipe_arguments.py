"""The command line of `bridge-cg train`."""

import argparse
from collections.abc import Sequence

from bridge_cg_plugin.cli import launch
from bridge_cg_plugin.cli.gpus import add_counts
from bridge_cg_plugin.cli.launch import LAUNCHERS, Job
from bridge_cg_plugin.options import OptionError, normalize
from bridge_cg_plugin.options.flags import FLAGS, add_flags, given_flags, unknown_flag
from bridge_cg_plugin.recipes import GPUS

_OF_SLURM = ("account", "partition", "time", "experiment_name", "container_image", "mount")
_JOB = ("nodes", "gpus_per_node", *_OF_SLURM, "env")


def build_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Return the command line.

    Args:
        description: What its help says before the flags.
    """
    parser = argparse.ArgumentParser(
        prog="bridge-cg train",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run = parser.add_argument_group("run")
    run.add_argument("--recipe", metavar="NAME", help="a recipe's or preset's name")
    run.add_argument(
        "--graphs", choices=tuple(GPUS), help="graphs within the limits of this GPU, on any recipe of Bridge"
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
    add_counts(start, "machines, with slurm", default=1)
    start.add_argument("--account", metavar="NAME", help="SLURM account")
    start.add_argument("--partition", metavar="NAME", help="SLURM partition")
    start.add_argument("--time", metavar="HH:MM:SS", help=f"SLURM time limit, {Job().time} if left out")
    start.add_argument(
        "--experiment_name",
        "--experiment-name",
        metavar="NAME",
        help=f"name of the SLURM job, {Job().name} if left out",
    )
    start.add_argument("--container_image", "--container-image", metavar="IMAGE", help="container of the SLURM job")
    start.add_argument("--mount", action="append", default=[], metavar="A:B", help="path mounted into the container")
    start.add_argument("--env", action="append", default=[], metavar="K=V", help="environment variable of the workers")
    return parser


def read(arguments: Sequence[str], description: str | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return parsed flags and the overrides after them.

    Args:
        arguments: The command line.
        description: What the help says before the flags.

    Raises:
        OptionError: A flag does not exist, its value alone cannot work, or there is no recipe. Nothing of upstream was
            imported.
    """
    parser = build_parser(description)
    parsed, words = parser.parse_known_args(arguments)
    for word in words:
        if word.startswith("-"):
            known = [spelling for flag in FLAGS for spelling in flag.spellings]
            raise unknown_flag(word, [*known, *(f"--{name}" for name in vars(parsed))])
    if parsed.recipe is None:
        raise OptionError.because("recipe", "Name a recipe: --recipe NAME. `bridge-cg recipes` lists them.")
    normalize(given_flags(parsed))
    return parsed, words


def worker_arguments(given: Sequence[str]) -> list[str]:
    """Return a command line without what only the launcher needs."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("launcher", *_JOB):
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), action="append")
    return parser.parse_known_args(list(given))[1]


def check_launch(parsed: argparse.Namespace) -> None:
    """Refuse a job that cannot be started, and flags of a job where none is.

    Raises:
        OptionError: Names the flag.
    """
    for name in _OF_SLURM:
        if getattr(parsed, name) and parsed.launcher != "slurm":
            why = f"with --launcher {parsed.launcher} no job is submitted. Remove it, or pass --launcher slurm."
            raise OptionError.because(name, f"Cannot use --{name}: {why}")
    if parsed.launcher == "none" and parsed.env:
        why = "without a launcher this process is the worker. Set the variable in its environment."
        raise OptionError.because("env", f"Cannot use --env {parsed.env[0]}: {why}")
    launch.check(parsed.launcher, job_of(parsed))


def job_of(parsed: argparse.Namespace) -> Job:
    """Return the job that a launcher starts.

    Raises:
        OptionError: An environment variable is not written as NAME=VALUE.
    """
    for variable in parsed.env:
        if "=" not in variable:
            raise OptionError.because("env", f"Cannot use --env {variable}: it must be NAME=VALUE.")
    return Job(
        nodes=parsed.nodes,
        gpus_per_node=parsed.gpus_per_node,
        account=parsed.account,
        partition=parsed.partition,
        time=parsed.time or Job().time,
        name=parsed.experiment_name or Job().name,
        container_image=parsed.container_image,
        mounts=tuple(parsed.mount),
        environment=dict(variable.split("=", 1) for variable in parsed.env),
    )
