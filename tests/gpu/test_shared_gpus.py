"""Two ranks on each of two GPUs: NCCL takes them for two hosts, and refuses them where it is not told to."""

import pytest

from examples.photographs.processes import TrainingFailed, TrainingProcess

from .shared_gpus import REPEATS, TIMED
from .trainings import ENVIRONMENT

MODULE = "tests.gpu.shared_gpus"
RANKS, GPUS = 4, (0, 1)
LIMIT_S = 90.0


def run(log, prepare=None):
    process = TrainingProcess(log, RANKS, GPUS, prepare, MODULE, ENVIRONMENT)
    process.wait_until_ready()
    return process.train("eager", [], LIMIT_S)


def test_ranks_that_share_gpus_reduce_eager_and_in_a_graph(tmp_path):
    result = run(tmp_path / "run.log")
    ranks = result["ranks"]
    for size in TIMED:
        print(
            f"all-reduce of {size} floats, mean ms of {REPEATS}: {[round(rank['ms'][str(size)], 2) for rank in ranks]}"
        )
    assert [rank["same_gpu"] for rank in ranks] == [0 + 2, 1 + 3, 0 + 2, 1 + 3]
    assert [rank["replays"] for rank in ranks] == [result["expected"]] * RANKS


def test_nccl_refuses_ranks_of_one_host_that_share_gpus(tmp_path):
    with pytest.raises(TrainingFailed) as caught:
        run(tmp_path / "run.log", f"{MODULE}:as_on_one_host")
    assert "Duplicate GPU detected" in caught.value.written
