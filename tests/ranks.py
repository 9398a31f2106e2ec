"""Several processes of one job on this machine's CPU, with gloo, for tests of what ranks do together.

They are forked from a copy of the test process. `start_server` makes it when the test modules are imported, which takes
long, and before a test runs: a process that has differentiated cannot be forked any more.
"""

import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import distributed

LIMIT_S = 240
_server: Connection | None = None


@dataclass(frozen=True)
class Job:
    """What ranks do; see `run_ranks`.

    Attributes:
        environment: Variables of each rank's process.
    """

    world: int
    work: Callable[..., Any]
    folder: Path
    args: tuple[Any, ...]
    sizes: dict[str, int]
    environment: dict[str, str]


def start_server() -> None:
    """Fork the process that ranks are forked from; it ends with this one."""
    global _server
    assert not distributed.is_initialized(), "a test module made a process group when it was imported"
    _server, requests = multiprocessing.Pipe()
    if os.fork() == 0:
        _server.close()
        _serve(requests)
    requests.close()


def run_ranks(world: int, work: Callable[..., Any], folder: Path, *args: Any, **sizes: int) -> list[Any]:
    """Return what each rank's call of `work(*args)` returned.

    Args:
        world: Processes.
        work: A function of a test module.
        folder: An empty folder for what the processes exchange.
        args: Arguments of `work`.
        sizes: Sizes of Megatron's parallel groups, as `initialize_model_parallel` names them.
    """
    assert _server is not None, "a test module that runs ranks imports `run_ranks` by name"
    _server.send(Job(world, work, folder, args, sizes, dict(os.environ)))
    hung = _server.recv()
    found = [_read(folder, rank) for rank in range(world)]
    failed = [f"rank {i}:\n{said}" for i, (good, said) in enumerate(found) if not good and i not in hung]
    assert not hung and not failed, f"ranks that hang: {hung}\n" + "\n".join(failed)
    return [value for _, value in found]


def _read(folder: Path, rank: int) -> tuple[bool, Any]:
    path = folder / f"{rank}.result"
    if path.exists():
        return pickle.loads(path.read_bytes())
    return False, f"ended without a result\n{(folder / f'{rank}.output').read_text()}"


def _serve(requests: Connection) -> None:
    while True:
        try:
            job = requests.recv()
        except EOFError:
            os._exit(0)
        requests.send(_run_all(job))


def _run_all(job: Job) -> list[int]:
    """Run all ranks; return those that had not ended in time."""
    running = {}
    for rank in range(job.world):
        pid = os.fork()
        if pid == 0:
            _rank(rank, job)
        running[pid] = rank
    deadline = time.monotonic() + LIMIT_S
    while running and time.monotonic() < deadline:
        ended, _ = os.waitpid(-1, os.WNOHANG)
        running.pop(ended, None)
        time.sleep(0 if ended else 0.005)
    for pid in running:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return sorted(running.values())


def _rank(rank: int, job: Job) -> None:
    os.environ.clear()
    os.environ.update(job.environment)
    sys.stdout = sys.stderr = (job.folder / f"{rank}.output").open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    try:
        result = True, _run(rank, job)
    except BaseException:
        result = False, traceback.format_exc()
    (job.folder / f"{rank}.result").write_bytes(pickle.dumps(result))
    for child in multiprocessing.active_children():  # of megatron-core's checkpoints
        child.kill()
    os._exit(0)  # a rank whose peers died would wait for them at exit


def _run(rank: int, job: Job) -> Any:
    from megatron.core import parallel_state

    distributed.init_process_group("gloo", init_method=f"file://{job.folder}/store", rank=rank, world_size=job.world)
    parallel_state.initialize_model_parallel(**job.sizes)
    return job.work(*job.args)
