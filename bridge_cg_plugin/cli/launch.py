"""Starting a script's workers: under torchrun on this machine, or on SLURM through NeMo-Run.

Imports neither torch nor Megatron.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks.configuration.training_config import precisions, refused_schedule

from .gpus import FIELDS, check_layouts, has_gpus_of_parts, replicas

LAUNCHERS = ("none", "torchrun", "slurm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Where a script runs.

    Attributes:
        nodes: Machines.
        gpus_per_node: Workers on each of them.
        account: SLURM account.
        partition: SLURM partition.
        time: SLURM time limit, HH:MM:SS.
        name: Name of the experiment.
        container_image: Container that the workers run in; None is the node's own environment.
        mounts: Paths mounted into the container, SOURCE:TARGET.
        environment: Environment variables of the workers.
    """

    nodes: int = 1
    gpus_per_node: int = 1
    account: str | None = None
    partition: str | None = None
    time: str = "01:00:00"
    name: str = "bridge_cg"
    container_image: str | None = None
    mounts: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def check(launcher: str, job: Job) -> None:
    """Refuse a job that its launcher cannot start.

    Raises:
        OptionError: torchrun has more than one node and has to be started on each of them; or NeMo-Run cannot be
            imported, or the job lacks an account or partition.
    """
    if launcher == "torchrun" and job.nodes != 1:
        raise OptionError(
            "nodes", job.nodes, "1 with --launcher torchrun", "Use --launcher slurm, or start torchrun on every node."
        )
    if launcher == "slurm":
        _nemo_run()
        for name in ("account", "partition"):
            if not getattr(job, name):
                raise OptionError.because(name, f"Cannot submit a job without --{name}: pass one of the cluster's.")


def torchrun(job: Job, script: str, arguments: Sequence[str]) -> None:
    """Replace this process by torchrun with the script. Does not return.

    Raises:
        OptionError: See `check`.
    """
    check("torchrun", job)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={job.gpus_per_node}"]
    os.execvpe(sys.executable, [*command, script, *arguments], {**os.environ, **job.environment})


def slurm(job: Job, script: str, arguments: Sequence[str]) -> None:
    """Submit the script to SLURM through NeMo-Run, one task per GPU, and return once it is submitted.

    Raises:
        OptionError: See `check`.
    """
    check("slurm", job)
    nemo_run = _nemo_run()
    task = nemo_run.Script(path=script, entrypoint="python", args=list(arguments))
    with nemo_run.Experiment(job.name) as experiment:
        experiment.add(task, executor=_executor(nemo_run, job), name="training")
        experiment.run(detach=True)


def _nemo_run() -> Any:
    try:
        import nemo_run
    except ImportError as error:
        raise OptionError(
            "launcher",
            "slurm",
            "none or torchrun while NeMo-Run cannot be imported",
            f"{error}. Install the package nemo-run, or start the script with srun, one task per GPU.",
        ) from None
    return nemo_run


def _executor(nemo_run: Any, job: Job) -> Any:
    executor = nemo_run.SlurmExecutor(
        account=job.account,
        partition=job.partition,
        nodes=job.nodes,
        ntasks_per_node=job.gpus_per_node,
        gpus_per_node=job.gpus_per_node,
        mem="0",
        exclusive=True,
        time=job.time,
        tunnel=nemo_run.LocalTunnel(job_dir=os.path.join(nemo_run.config.get_nemorun_home(), "experiments")),
        packager=nemo_run.Packager(),
    )
    executor.env_vars = dict(job.environment)
    if job.container_image:
        executor.container_image, executor.container_mounts = job.container_image, list(job.mounts)
    return executor


_LAYERS = ("model.num_layers", "model.hidden_size")
LEAST = {
    1: (
        *("dataset.seq_length", "model.seq_length", "train.micro_batch_size", "train.global_batch_size"),
        *("scheduler.lr_decay_iters", "scheduler.lr_decay_samples", "scheduler.lr_wsd_decay_iters"),
        *("model.ffn_hidden_size", "logger.log_interval", *(f"model.{field}" for field in FIELDS)),
    ),
    0: (
        *("train.train_iters", "scheduler.lr_warmup_iters", "scheduler.lr_warmup_samples", *_LAYERS),
        *("optimizer.lr", "optimizer.min_lr", "optimizer.weight_decay", "optimizer.clip_grad"),
        *("validation.eval_iters", "validation.eval_interval", "checkpoint.save_interval"),
    ),
}
# Sections that Bridge reads without asking whether they are there.
SECTIONS = ("checkpoint", "dataset", "ddp", "dist", "logger", "model", "optimizer", "scheduler", "train")
# Fields by which stages of a pipeline have different numbers of layers.
_UNEVEN = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
)


@dataclass(frozen=True, slots=True)
class Unfit:
    """A value that nothing trains with.

    Attributes:
        field: Its name on the command line.
        value: The value.
        allowed: What it must be.
        remedy: What to do.
    """

    field: str
    value: Any
    allowed: str
    remedy: str = "Correct it."


def check_trainable(recipe: str, config: Any, gpus: int | None, complete: bool = False) -> None:
    """Refuse values that nothing trains with, a layout that does not divide its model or GPUs, and odd batches.

    Args:
        recipe: The recipe's name.
        config: A Bridge `ConfigContainer`.
        gpus: How many GPUs there are; None where that is not known.
        complete: Whether nothing will be set any more of what some recipes leave open.

    Raises:
        OptionError: Names the fields and what is needed.
    """
    check_sections(recipe, config)
    _refuse(recipe, _values(config))
    if complete:
        _refuse(recipe, _left_open(config))
    if not has_gpus_of_parts(config.model):
        _refuse(recipe, _sizes(config.model))
    if gpus is not None:
        check_layouts(config.model, gpus)
    if config.train.rampup_batch_size is None:
        _refuse(recipe, _batches(config, gpus))
    refuse_bridges(recipe, refused_schedule(config))


def check_sections(recipe: str, config: Any) -> None:
    """Refuse a configuration in which a word put a plain value, or nothing, in the place of a section.

    Raises:
        OptionError: Names the section.
    """
    for name in SECTIONS:
        section = getattr(config, name, config)
        if section is None or isinstance(section, int | float | str | list | dict):
            _refuse(recipe, iter([Unfit(name, section, "a section", f"Write {name}.FIELD=VALUE.")]))


def refuse_bridges(recipe: str, why: str) -> None:
    """Refuse what Bridge refuses.

    Args:
        recipe: The recipe's name.
        why: Bridge's message; empty where it refuses nothing.

    Raises:
        OptionError: Has the message.
    """
    if why:
        raise OptionError.because("recipe", f"Cannot start {recipe}: Bridge refuses it. {' '.join(why.split())}")


def _refuse(recipe: str, found: Iterator[Unfit]) -> None:
    for one in found:
        why = f"{one.field} must be {one.allowed}, not {one.value!r}. {one.remedy}"
        raise OptionError.because(one.field, f"Cannot start {recipe}: {why}")


def _values(config: Any) -> Iterator[Unfit]:
    """Yield values that are too low or no name."""
    for least, names in LEAST.items():
        yield from _too_low(config, names, least)
    precision = getattr(config, "mixed_precision", None)
    if isinstance(precision, str) and precision.replace("-", "_") not in precisions():
        yield Unfit("mixed_precision", precision, f"one of {', '.join(precisions())}")


def _too_low(config: Any, names: Iterable[str], least: int) -> Iterator[Unfit]:
    for name in names:
        value = _value(config, name)
        if value is not None and value < least:
            yield Unfit(name, value, f"at least {least}")


def _left_open(config: Any) -> Iterator[Unfit]:
    """Yield what keeps some of Bridge's recipes from training until a person sets it."""
    yield from _too_low(config, _LAYERS, 1)
    rate, lowest = _value(config, "optimizer.lr"), _value(config, "optimizer.min_lr")
    if None not in (rate, lowest) and lowest > rate:
        yield Unfit("optimizer.min_lr", lowest, f"at most optimizer.lr={rate}", "Change either.")


def _value(config: Any, name: str) -> Any:
    """Return a number of a section; None where there is none, or its value is not known."""
    section, _, field = name.partition(".")
    value = getattr(getattr(config, section, None), field, None)
    return value if isinstance(value, int | float) else None


def _sizes(model: Any) -> Iterator[Unfit]:
    """Yield sizes that leave a rank a part of an attention head or other layers than megatron-core's, or do not fit."""
    tensor, pipeline = (getattr(model, f"{kind}_model_parallel_size", None) or 1 for kind in ("tensor", "pipeline"))
    heads, layers, hidden = (_whole(model, name) for name in ("num_attention_heads", "num_layers", "hidden_size"))
    if heads % tensor:
        yield _indivisible("tensor_model_parallel_size", tensor, f"num_attention_heads={heads}")
    if layers % pipeline and not any(getattr(model, name, None) for name in _UNEVEN):
        yield _indivisible("pipeline_model_parallel_size", pipeline, f"num_layers={layers}")
    if heads and hidden % heads and getattr(model, "kv_channels", None) is None:
        allowed = f"a multiple of model.num_attention_heads={heads}"
        yield Unfit("model.hidden_size", hidden, allowed, "Change either, or set model.kv_channels.")
    out = _whole(getattr(model, "vision_config", None), "out_hidden_size")
    if out and hidden and out != hidden:
        yield Unfit("model.hidden_size", hidden, f"model.vision_config.out_hidden_size={out}", "Change either.")


def _whole(owner: Any, name: str) -> int:
    """Return a size; 0 where it is not known."""
    value = getattr(owner, name, None)
    return value if isinstance(value, int) else 0


def _indivisible(field: str, size: int, divided: str) -> Unfit:
    return Unfit(f"model.{field}", size, f"a divisor of model.{divided}", "Change either.")


def _batches(config: Any, gpus: int | None) -> Iterator[Unfit]:
    batch, micro = config.train.global_batch_size, config.train.micro_batch_size
    shares = 1 if gpus is None else replicas(config.model, gpus)
    if batch is None or micro is None or batch % (micro * shares) == 0:
        return
    shared = f" times {shares} data-parallel replicas" if shares > 1 else ""
    allowed = f"a multiple of train.micro_batch_size={micro}{shared}"
    yield Unfit("train.global_batch_size", batch, allowed, f"Write a multiple of {micro * shares}.")
