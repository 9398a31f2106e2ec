"""Training runs over several processes: layouts, the processes of a run, what is gathered of their results."""

import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.photographs.hosts import placement, ranks_per_gpu
from examples.photographs.layout import Layout
from examples.photographs.processes import TrainingFailed, TrainingProcess
from tests.unit.stand_in_ranks import FAILING_STEPS

STAND_IN = "tests.unit.stand_in_ranks"


def test_other_processes_than_the_layout_has_are_refused(monkeypatch):
    from examples.photographs.__main__ import main

    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(sys, "argv", ["photographs", "--tensor-parallel", "2"])
    with pytest.raises(ValueError, match="Cannot train in 4 processes: the layout TP2 has 2 ranks"):
        main()


@pytest.mark.parametrize(
    "layout",
    [Layout(tensor=2), Layout(pipeline=2), Layout(pipeline=2, chunks=2), Layout(context=2), Layout(data=2)],
    ids=str,
)
def test_bridge_accepts_the_configuration_of_a_layout(layout):
    from examples.photographs import training

    depth = layout.fitting_layers(4)
    config = training.training_config(training.Run(layout=layout, small=True, language_model=(depth, 2048)))
    config.model.finalize()
    assert config.model.sequence_parallel is (layout.tensor > 1)
    assert config.ddp.average_in_collective is (layout.context == 1)
    assert config.model.calculate_per_token_loss is (layout.context > 1)


def variables(ranks, gpus):
    return [placement(rank, ranks, gpus) for rank in range(ranks)]


@given(st.integers(1, 9), st.integers(1, 9))
def test_no_two_ranks_have_one_gpu_of_one_host(ranks, gpus):
    placed = variables(ranks, gpus)
    assert [each["RANK"] for each in placed] == [str(rank) for rank in range(ranks)]
    assert {each["WORLD_SIZE"] for each in placed} == {str(ranks)}
    assert all(int(each["LOCAL_RANK"]) < gpus for each in placed)
    places = {(each.get("NCCL_HOSTID"), each["LOCAL_RANK"]) for each in placed}
    assert len(places) == ranks
    assert len({host for host, _ in places}) == ranks_per_gpu(ranks, gpus)


def processes(log, ranks, devices, **further):
    return TrainingProcess(log, ranks, devices, f"{STAND_IN}:start_a_thread", STAND_IN, **further)


@pytest.fixture
def two_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("examples.photographs.processes.GRACE_S", 1.0)
    process = processes(tmp_path / "run.log", 2, (2, 3))
    process.wait_until_ready()
    yield process
    process.close()


def test_every_process_knows_its_place(two_processes):
    first, second = two_processes.train("eager", ["--steps", "1"])
    assert (first["RANK"], second["RANK"]) == (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    assert first["workers"] == second["workers"] == "fork"  # some of Bridge's data sets cannot be pickled
    assert first["WORLD_SIZE"] == second["WORLD_SIZE"] == "2"
    assert first["CUDA_VISIBLE_DEVICES"] == second["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert first["threads"] == second["threads"] > 1, "they were prepared"


def test_one_process_that_fails_ends_the_others_and_is_named(two_processes):
    began = time.monotonic()
    with pytest.raises(TrainingFailed, match="process 1 of 2 ended with status 1(.|\n)*rank 1 is out of memory"):
        two_processes.train("eager", ["--steps", str(FAILING_STEPS)])
    assert time.monotonic() - began < 30
