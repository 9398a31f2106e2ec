"""Several processes of one job on this machine's CPU, with gloo, for tests of what ranks do together.

They are forked from a server that imported the stack once, so that a test takes seconds.
"""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.unit.towers"])
LIMIT_S = 240


def run_ranks(world: int, work: Callable[..., Any], folder: Path, *args: Any, **sizes: int) -> list[Any]:
    """Return what each rank's call of `work(*args)` returned.

    Args:
        world: Processes.
        work: A function of a test module.
        folder: An empty folder for what the processes exchange.
        args: Arguments of `work`.
        sizes: Sizes of Megatron's parallel groups, as `initialize_model_parallel` names them.
    """
    ranks = [CONTEXT.Process(target=_rank, args=(i, world, work, folder, args, sizes)) for i in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT_S)
    hung = [i for i, process in enumerate(ranks) if process.is_alive()]
    for i in hung:
        ranks[i].kill()
    found = [_read(folder / f"{i}.result") for i in range(world)]
    failed = [f"rank {i}:\n{said}" for i, (good, said) in enumerate(found) if not good and i not in hung]
    assert not hung and not failed, f"ranks that hang: {hung}\n" + "\n".join(failed)
    return [value for _, value in found]


def _read(path: Path) -> tuple[bool, Any]:
    return pickle.loads(path.read_bytes()) if path.exists() else (False, "ended without a result")


def _rank(
    rank: int, world: int, work: Callable[..., Any], folder: Path, args: tuple[Any, ...], sizes: dict[str, int]
) -> None:
    try:
        result = True, _run(rank, world, work, folder, args, sizes)
    except BaseException:
        result = False, traceback.format_exc()
    (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
    os._exit(0)  # a rank whose peers died would wait for them at exit


def _run(
    rank: int, world: int, work: Callable[..., Any], folder: Path, args: tuple[Any, ...], sizes: dict[str, int]
) -> Any:
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(**sizes)
    return work(*args)
