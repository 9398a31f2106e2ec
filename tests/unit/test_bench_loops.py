"""The benchmark of other training loops without a GPU: samples, batches, turns, records, what is refused."""

import hashlib
import math

import pytest

from bridge_cg_plugin.cli.runs.results import provenance, read_records
from bridge_cg_plugin.graphs.planning.buckets import GRANULARITY
from examples.photographs.processes import TrainingFailed
from scripts.performance import bench_loops
from scripts.performance.loops import records
from scripts.performance.loops.rounds import PASSES, Round, worker_arguments
from scripts.performance.loops.samples import (
    MIXES,
    PAIR,
    draw_round,
)
from scripts.performance.records import check_record

# Of the lengths, grids and seeds of a round's samples as records have them.
RECORDED = "059be5a239c7ed33"


def a_round(scale=1.0, captured=0.0, shift=0.0, **fields):
    passes = {
        name: {"ms": scale * ms + 1e3 * captured, "capture_s": captured, "replays": 3}
        for name, ms in zip(PASSES, (20.0, 30.0, 50.0), strict=True)
    }
    log_probs = {"old": [-1.0 + shift, -2.0], "reference": [-3.0]}
    own = Round(4, log_probs=log_probs, loss=1.0 + shift, grad_norm=2.0).as_dict()
    away = {"away_gb": 1.0, "bit_equal": True}
    return own | away | {"passes": passes} | fields


def a_run(rounds, graphs=(), parts=1):
    return {"rounds": rounds, "graphs": list(graphs), "parts": parts}


GRAPHS = {"capture_seconds": 2.5, "memory_bytes": 3 * 2**30}


class TestSamples:
    def test_all_mixes_of_a_total_have_as_many_patches_and_pairs_fill_a_bucket(self):
        for total, each in MIXES.items():
            assert {sum(math.prod(grid) for grid in grids) for grids in each} == {total}
            assert PAIR * total % GRANULARITY == 0
        assert all(h % 2 == w % 2 == 0 for each in MIXES.values() for grids in each for _, h, w in grids)
        assert max(len(grids) for each in MIXES.values() for grids in each) == 3

    def test_usual_samples_are_those_of_the_records(self):
        drawn = [(len(sample.prompt), len(sample.response), sample.grids, sample.seed) for sample in draw_round(1, 0)]
        assert hashlib.sha256(repr(drawn).encode()).hexdigest()[:16] == RECORDED


class TestRecords:
    def test_graphs_beside_eager(self):
        eager = [a_run([a_round(2.0, shift=0.01 * n) for _ in range(6)]) for n in range(2)]
        graphs = a_run(
            [a_round(), a_round(), a_round(), a_round(captured=0.25), a_round(shift=0.5), a_round()], [GRAPHS] * 2
        )
        found = records.record_of(graphs, eager)
        assert found["ratio"] == pytest.approx(0.5)
        assert found["bit_equal"] is True and found["log_prob_diff"][4] == pytest.approx(0.5)
        assert found["log_prob_noise"] == pytest.approx([0.01] * 6)
        assert found["inside_spread"] is False
        assert found["recapture_s"] == pytest.approx([0.75, 0.0, 0.0])
        assert found["graph_share"] == pytest.approx(0.75)
        assert (found["capture_s"], found["memory_gb"]) == (5.0, 6.0)
        check_record({"case": "verl", "mode": "plugin", **provenance(5, 0), **found})

    def test_any_round_that_differs_from_eager_passes_over_its_weights_is_not_equal(self):
        rounds = [a_round(bit_equal=number != 4) for number in range(6)]
        assert records.record_of(a_run(rounds))["bit_equal"] is False
        assert records.record_of(a_run(rounds[:4]), [a_run(rounds)])["bit_equal"] is True

    def test_nan_is_a_difference(self):
        assert math.isnan(records.log_prob_differences([a_round(shift=math.nan)], [a_round()])[0])


@pytest.fixture
def runs(monkeypatch):
    """Return a function that sets what runs give or raise; what each was told is listed, in order."""
    begun = []
    monkeypatch.setattr(bench_loops.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(bench_loops, "files", lambda folder: folder)

    def give(**by_mode):
        class Process:
            def __init__(self, log, module, environment):
                environments[log.stem] = environment
                assert module == bench_loops.WORKER

            def wait_until_ready(self):
                pass

            def train(self, mode, words):
                begun.append((mode, worker_arguments(["--train", mode, "--out", "x", *words])))
                if isinstance(by_mode[mode], Exception):
                    raise by_mode[mode]
                return by_mode[mode]

            def close(self):
                pass

        monkeypatch.setattr(bench_loops, "TrainingProcess", Process)
        return begun

    environments = give.environments = {}
    return give


class TestBench:
    def measure(self, out, case="verl", modes=("eager1", "plugin", "eager2")):
        status = bench_loops.main(["--cases", case, "--modes", ",".join(modes), "--rounds", "4", "--out", str(out)])
        return status, {record["mode"]: record for record in read_records(out)}

    def test_records_are_written_and_completed(self, runs, tmp_path):
        eager = a_run([a_round(2.0)] * 4)
        begun = runs(eager1=eager, eager2=eager, plugin=a_run([a_round()] * 4, [GRAPHS]))
        status, found = self.measure(tmp_path / "loops.jsonl")
        assert status == 0 and [(mode, args.case, args.rounds) for mode, args in begun] == [
            (mode, "verl", 4) for mode in ("eager1", "plugin", "eager2")
        ]
        assert found["plugin"]["ratio"] == pytest.approx(0.5) and found["plugin"]["inside_spread"] is True
        assert "ratio" not in found["eager1"] and "inside_spread" not in found["eager2"]

    def test_a_run_that_fails_has_a_record_and_others_go_on(self, runs, tmp_path, capsys):
        eager = a_run([a_round(2.0)] * 4)
        runs(eager1=eager, eager2=eager, plugin=TrainingFailed("it", "all of its log\nRuntimeError: no memory"))
        status, found = self.measure(tmp_path / "loops.jsonl")
        assert status == 1 and "no memory" in found["plugin"]["error"] and "ms" in found["eager2"]
        assert "all of its log" in capsys.readouterr().err

    @pytest.mark.parametrize("words", [["--cases", "ver"], ["--modes", "fast"], ["--rounds", "3"]])
    def test_what_cannot_work_is_refused(self, words):
        with pytest.raises(SystemExit, match="2"):
            bench_loops.parse(words)
