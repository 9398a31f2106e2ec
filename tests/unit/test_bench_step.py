"""The benchmark of whole steps: its runs and records, with stand-ins for the processes."""

from contextlib import contextmanager

import pytest

from bridge_cg_plugin.cli.runs.results import read_records
from examples.photographs import training
from examples.photographs.arguments import parse
from examples.photographs.processes import TrainingFailed
from scripts.performance import bench_step
from scripts.performance.records import check_record

STEPS = 8


@pytest.fixture
def told(monkeypatch):
    """What each process was told; eager takes 100 ms a step, graphs 50, upstream's fail."""
    lines = []

    class Process:
        @classmethod
        @contextmanager
        def started(cls):
            yield cls()

        def wait_until_ready(self):
            pass

        def train(self, mode, words):
            lines.append((mode, *words))
            if mode == "upstream":
                raise TrainingFailed("process 0 of 1 ended with status 1", "RuntimeError: capture aborted")
            ms = 100.0 if mode == "eager" else 50.0
            figures = {"losses": [2.0] * STEPS, "grad_norms": [1.0] * STEPS, "peak_gb": 3.0, "graphs": None}
            return {**figures, "step_ms": [9e3] * 6 + [ms] * (STEPS - 6), "language_model_layers": 0}

    monkeypatch.setattr(bench_step, "TrainingProcess", Process)
    return lines


def test_every_run_has_a_record_beside_eager(told, tmp_path):
    words = ["--images", "mixed", "--language-models", "4x2048", "--modes", "eager,upstream,plugin"]
    assert bench_step.main([*words, "--steps", str(STEPS), "--out", str(tmp_path / "r.jsonl")]) == 0
    found = {r["mode"]: r for r in read_records(tmp_path / "r.jsonl")}
    for record in found.values():
        check_record(record)
    assert (found["eager"]["ratio"], found["plugin"]["ratio"], found["plugin"]["loss_rel"]) == (1.0, 0.5, 0.0)
    assert found["upstream"]["error"] == "RuntimeError: capture aborted" and not found["upstream"]["overlap"]
    for mode, *words in told:
        run = training.run_of(parse(["--train", mode, *words]))
        assert (run.steps, run.language_model, run.distinct) == (STEPS, (4, 2048), bench_step.DISTINCT)


@pytest.mark.parametrize("words", [["--steps", "6"], ["--modes", "eager,fast"], ["--images", "tiny"]])
def test_what_cannot_be_measured_is_refused(words):
    with pytest.raises(SystemExit, match="2"):
        bench_step.parse(words)
