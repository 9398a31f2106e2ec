"""Examples without a GPU: photographs, the main job, layouts and processes of its runs, upstream's graphs."""

import sys
import time

import pytest

from examples.photographs import gpu
from examples.photographs.layout import Layout
from examples.photographs.processes import TrainingFailed, TrainingProcess
from examples.upstream_vision_graphs import distance, without_positions_and_boundaries

from .towers import draw, new_tower


def run_of(losses, replays=4):
    graphs = {"replays": replays} if replays is not None else None
    steps = len(losses)
    return {"losses": losses, "grad_norms": [1.0] * steps, "step_ms": [100.0] * steps, "peak_gb": 1.0, "graphs": graphs}


EAGER = [2.0] * 8, [2.1] * 8


@pytest.fixture
def runs(monkeypatch):
    """Return a function that sets what the three processes of the main job give."""

    def give(graphs, replays=4):
        eager = iter([run_of(EAGER[0], None), run_of(EAGER[1], None)])
        modes = []

        class Process:
            def __init__(self, ranks):
                modes.append(f"{ranks} GPU")

            def wait_until_ready(self):
                modes.append("ready")

            def train(self, mode, arguments):
                modes.append(mode)
                if mode == "eager":
                    return next(eager)
                return run_of(graphs, replays)

            def close(self):
                modes.append("closed")

        monkeypatch.setattr(gpu, "TrainingProcess", Process)
        return modes

    return give


@pytest.mark.parametrize(
    "graphs, replays, status",
    [([2.05] * 8, 4, 0), ([2.05] * 7 + [2.5], 4, 1), ([2.05] * 8, 0, 1), ([float("nan")] * 8, 4, 1)],
)
def test_graphs_inside_the_spread_end_with_zero_and_others_with_one(runs, graphs, replays, status, capsys):
    modes = runs(graphs, replays)
    assert gpu.main(8, 2, []) == status
    assert modes == ["1 GPU"] * 3 + ["ready"] * 3 + ["eager", "eager", "graphs"] + ["closed"] * 3
    said = capsys.readouterr().out
    assert f"verdict: {'DIFFERENT' if status else 'SAME'}" in said
    assert not status or ("2 eager runs say little" in said) == (replays > 0)


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


def test_one_process_that_fails_ends_the_others_and_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("examples.photographs.processes.GRACE_S", 1.0)
    process = TrainingProcess(tmp_path / "run.log", 2, (2, 3), module="tests.unit.stand_in_ranks")
    process.wait_until_ready()
    began = time.monotonic()
    with pytest.raises(TrainingFailed, match="process 1 of 2 ended with status 1(.|\n)*rank 1 is out of memory"):
        process.train("eager", ["--steps", "1"])
    process.close()
    assert time.monotonic() - began < 30


TWO, ONE = [(1, 4, 4), (1, 4, 4)], [(1, 4, 4)]


def test_positions_and_boundaries_are_left_out_once():
    model = new_tower()
    pixels, grid = draw(TWO)
    eager = model(pixels, grid)[0].detach()
    changed = without_positions_and_boundaries(model, pixels, grid)
    assert distance(changed, eager) > 1e-3
    assert distance(model(pixels, grid)[0].detach(), eager) == 0
    # Every patch attends to both images: another second image changes the first one's embeddings.
    other = pixels.clone()
    other[len(pixels) // 2 :] += 1
    half = len(eager) // 2
    assert distance(model(other, grid)[0].detach()[:half], eager[:half]) == 0
    assert distance(without_positions_and_boundaries(model, other, grid)[:half], changed[:half]) > 1e-3
