"""What test_shared_gpus.py runs in every process: collectives of ranks that share GPUs, eager and in a CUDA graph."""

import argparse
import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

REPLAYS = 3
# Elements of float32 that reductions are timed with: latency and throughput.
TIMED = (1024, 16 * 2**20)
REPEATS = 10


def as_on_one_host() -> None:
    """Let NCCL see what the ranks are: processes of one host."""
    os.environ.pop("NCCL_HOSTID", None)


def train_words(words: Sequence[str]) -> None:
    """Reduce over all ranks and over those of one GPU; rank 0 writes what every rank found."""
    parser = argparse.ArgumentParser(prog="shared_gpus")
    parser.add_argument("--train", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl", timeout=timedelta(seconds=60))
    rank, world = distributed.get_rank(), distributed.get_world_size()
    gathered: list[dict[str, Any]] = [{} for _ in range(world)]
    distributed.all_gather_object(gathered, found(rank, world), distributed.new_group(backend="gloo"))
    if rank == 0:
        args.out.write_text(json.dumps({"ranks": gathered, "expected": expected(world)}))
    distributed.destroy_process_group()


def expected(world: int) -> list[list[float]]:
    """Return what every replay must give on every rank."""
    ranks = range(1, world + 1)
    return [[value * sum(ranks) for value in (1.0, 2.0 + replay)] for replay in range(REPLAYS)]


def found(rank: int, world: int) -> dict[str, Any]:
    """Return a rank's sums and times."""
    share = torch.full((1,), float(rank), device="cuda")
    gpus = torch.cuda.device_count()
    groups = [distributed.new_group(list(range(gpu, world, gpus))) for gpu in range(gpus)]
    distributed.all_reduce(share, group=groups[rank % gpus])
    return {"same_gpu": share.item(), "replays": replayed(rank), "ms": {str(size): reduce_ms(size) for size in TIMED}}


def replayed(rank: int) -> list[list[float]]:
    """Return the results of a captured reduction, replayed with other values each time."""
    values = torch.zeros(2, device="cuda")
    result = torch.zeros_like(values)
    reduce_into(result, values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        reduce_into(result, values)
    results = []
    for replay in range(REPLAYS):
        values.copy_(torch.tensor([1.0, 2.0 + replay]) * (rank + 1))
        graph.replay()
        results.append(result.tolist())
    return results


def reduce_into(result: Tensor, values: Tensor) -> None:
    result.copy_(values)
    distributed.all_reduce(result)


def reduce_ms(size: int) -> float:
    """Return the mean ms of a reduction over all ranks."""
    values = torch.ones(size, device="cuda")
    distributed.all_reduce(values)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(REPEATS):
        distributed.all_reduce(values)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / REPEATS * 1e3
