"""Starting a script's workers: under torchrun on this machine, or on SLURM through NeMo-Run.

Imports neither torch nor Megatron.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridge_cg_plugin.options import OptionError

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
