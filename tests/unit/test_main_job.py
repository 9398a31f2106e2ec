import pytest

from examples.photographs import gpu


def run_of(losses, replays=4):
    graphs = {"replays": replays} if replays is not None else None
    steps = len(losses)
    return {
        "losses": losses,
        "grad_norms": [1.0] * steps,
        "step_ms": [100.0] * steps,
        "peak_gb": 1.0,
        "graphs": graphs,
    }


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


def test_graphs_inside_the_spread_end_with_zero(runs, capsys):
    modes = runs([2.05] * 8)
    assert gpu.main(8, 2, []) == 0
    assert modes == ["1 GPU"] * 3 + ["ready"] * 3 + ["eager", "eager", "graphs"] + ["closed"] * 3
    assert "verdict: SAME" in capsys.readouterr().out


@pytest.mark.parametrize("graphs, replays", [([2.05] * 7 + [2.5], 4), ([2.05] * 8, 0), ([float("nan")] * 8, 4)])
def test_other_losses_or_no_replay_end_with_one(runs, graphs, replays, capsys):
    runs(graphs, replays)
    assert gpu.main(8, 2, []) == 1
    said = capsys.readouterr().out
    assert "verdict: DIFFERENT" in said
    assert ("2 eager runs say little" in said) == (replays > 0)
