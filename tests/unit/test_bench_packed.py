"""What the benchmark of packed documents makes of its measurements."""

import json
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch

from bridge_cg_plugin.attention_bounds import scan_cost
from bridge_cg_plugin.cli.planner.cost import load_cost_model
from bridge_cg_plugin.cli.planner.defaults import DEFAULTS
from bridge_cg_plugin.cli.planner.plan import place
from bridge_cg_plugin.cli.runs.results import check_record, provenance, read_records
from bridge_cg_plugin.graphs.errors import CaptureError, OutOfMemoryInCapture
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.language.packed.fit import pack_buckets
from scripts.performance import bench_packed
from scripts.performance.models import language_model
from scripts.performance.models.language_model import SHAPES, Pack, draw, split
from scripts.performance.packed import bench as packed_bench
from scripts.performance.packed import cases, limits
from scripts.performance.packed import plans as packed_plans
from scripts.performance.packed.bench import PLANNED
from scripts.performance.packed.costs import Measured, fit, non_negative
from scripts.performance.packed.limits import WANTED, failures
from scripts.performance.processes import TrainingFailed

from . import packs


def record(case="dense_2048", mode="plugin", **changes):
    values = {
        "case": case,
        "mode": mode,
        "tokens": 2048,
        "documents": 5,
        "ms": 30.0,
        "ratio": 0.3,
        "bit_equal": True,
        "forward_rel": 0.0,
        "grad_rel": 0.0,
        "forward_noise": 0.0,
        "grad_noise": 0.0,
        "fallbacks": {},
        **provenance(3, 0),
    }
    made = {**values, **changes}
    check_record(made)
    return made


def plan(mode, ms, predicted, bound=16):
    changes = {"predicted_ms": predicted, "chosen": bound == 16, "max_packed_seqs": bound, "bucket": "4096"}
    return record("plan_short", mode, ms=ms, **changes)


GOOD = [
    record(mode="eager", ms=100.0, ratio=1.0),
    record(),
    record(mode="plugin_4x", ms=30.5, ratio=0.305, max_packed_seqs=20),
    plan("plugin", 50.0, 52.0),
    plan("exhaustive_chosen", 50.5, 52.0),
    plan("exhaustive_32", 49.7, 70.0, 32),
]


# Where eager could not be made to add up in one order.
ROUNDED = {"bit_equal": None, "grad_noise": 1e-3}


def test_what_is_wanted_passes():
    assert failures(GOOD) == []
    rounded = {**GOOD[1], "grad_rel": 1.4e-3, "grad_noise": 1e-3}
    del rounded["bit_equal"]
    assert failures([GOOD[0], rounded]) == []
    assert {*WANTED, PLANNED} == set(SHAPES)


@pytest.mark.parametrize(
    "index, changes, message",
    [
        (1, {"ratio": 0.5}, "dense_2048: 2.00 times as fast as eager, wanted 2.5"),
        (1, {"fallbacks": {"too_many_tokens": 1}}, "too_many_tokens"),
        (1, {"bit_equal": False, "grad_rel": 1.6e-3}, "gradients by 1.60e-03, eager runs by 0.00e+00"),
        (1, {"bit_equal": False, "forward_rel": float("nan")}, "losses differ by nan, eager runs by 0.00e+00"),
        (1, {**ROUNDED, "grad_rel": 1.6e-3}, "gradients by 1.60e-03, eager runs by 1.00e-03"),
        (1, {**ROUNDED, "grad_rel": float("nan")}, "gradients by nan"),
        (1, {**ROUNDED, "forward_rel": 1e-6}, "losses differ by 1.00e-06"),
        (2, {"ms": 31.0}, "cost more than 3 %"),
        (3, {"predicted_ms": 53.0}, "predicted 53.0 ms, measured 50.0 ms"),
        (5, {"ms": 49.0}, "the choice takes 50.5 ms, the best 49.0 (32 documents, 4096)"),
        (2, {"error": "CaptureError: no memory"}, "dense_2048, plugin_4x: CaptureError: no memory"),
        (3, {"mode": "exhaustive_16"}, "the recommended choice was not measured"),
    ],
)
def test_what_misses_it_is_named(index, changes, message):
    changed = {name: value for name, value in {**GOOD[index], **changes}.items() if value is not None}
    records = [changed if i == index else r for i, r in enumerate(GOOD)]
    (found,) = failures(records)
    assert message in found


def test_the_fit_has_no_weight_below_zero():
    rows = [[1.0, x, x * x] for x in range(1, 9)]
    curve = [3.0 + 2.0 * x + 0.5 * x * x for x in range(1, 9)]
    assert non_negative(rows, curve) == pytest.approx([3.0, 2.0, 0.5])
    found = non_negative(rows, [3.0 + 2.0 * x - 0.1 * x * x for x in range(1, 9)])
    assert min(found) == 0.0 and found[1] > 0


def test_a_cost_model_is_found_again():
    """What a known cost model would measure gives that model."""
    known = DEFAULTS["packed"]
    measured = []
    for tokens, documents in (*packed_bench.SHAPES, *((n, 5) for n in limits.TOKENS)):
        lengths = split(tokens, documents)
        bounds = max(documents, 32), max(lengths)
        busy = known.busy_ms(tokens, lengths, *bounds)
        memory = known.memory_gb(tokens) * 1024
        measured.append(Measured(lengths, bounds, known.eager_ms(lengths), busy, busy, memory))
    found = fit(measured, "test")
    for pack in measured:
        assert found.graph_ms(pack.tokens, pack.lengths, *pack.limits) == pytest.approx(pack.graphs_ms, rel=1e-6)
        assert found.memory_gb(pack.tokens) == pytest.approx(known.memory_gb(pack.tokens))
    assert found.per_row_ms == pytest.approx(known.per_row_ms) and scan_cost(*measured[0].limits) > 0


def with_packs(monkeypatch, tokens):
    for module in (packed_bench, cases, limits):
        monkeypatch.setattr(module, "TOKENS", tokens)


class FakeProcess:
    """Measures nothing, in no time; one model ends with an error."""

    def __init__(self, prepare, module):
        assert prepare == f"{module}:import_stack" and module == cases.MODULE

    wait_until_ready = close = lambda self: None

    def train(self, mode, words, limit_s):
        assert limit_s == cases.LIMIT_S
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            try:
                cases.train_words(["--train", mode, "--out", str(out), *words])
            except KeyboardInterrupt:
                raise TrainingFailed("process 0 of 1 ended with status 1: made to fail") from None
            return json.loads(out.read_text())


class FakeBench:
    def __init__(self, name, repeats, fused_rope):
        self.name = name

    def pack(self, tokens):
        if (self.name, tokens) == ("moe", 4096):
            raise torch.OutOfMemoryError("made to fail")
        if (self.name, tokens) == ("moe", 8192):
            raise KeyboardInterrupt
        yield record(f"{self.name}_{tokens}", tokens=tokens, ratio=0.2)

    def free_memory(self):
        pass

    def forecast(self):
        return DEFAULTS["packed"]

    def costs(self):
        yield from ()

    def fit_costs(self, out):
        return DEFAULTS["packed"]

    def plan(self, found):
        yield from GOOD[3:] if found.name == "short" else ()


def run(monkeypatch, tmp_path, *words):
    monkeypatch.setattr(cases, "TrainingProcess", FakeProcess)
    monkeypatch.setattr(cases, "Bench", FakeBench)
    monkeypatch.setattr("scripts.performance.models.tower.start_process", lambda: None)
    monkeypatch.setattr("sys.argv", ["bench_packed.py", "--out", str(tmp_path / "r.jsonl"), *words])
    return bench_packed.main()


def test_every_model_has_a_process_and_records(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, "--models", "dense,large", "--plans") == 0
    found = [one["case"] for one in read_records(tmp_path / "r.jsonl")]
    assert found == [f"{m}_{n}" for m in ("dense", "large") for n in (2048, 4096, 8192)] + ["plan_short"] * 3
    assert "all 9 records inside their limits" in capsys.readouterr().out


def test_costs_go_without_models_and_plans(monkeypatch, tmp_path):
    assert run(monkeypatch, tmp_path, "--models", "", "--cost-model", str(tmp_path / "c.json")) == 0
    assert read_records(tmp_path / "r.jsonl") == []


def test_a_pack_or_a_process_that_fails_is_named_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, "--models", "moe,dense") == 1
    found = capsys.readouterr().out
    assert "moe: TrainingFailed: process 0 of 1 ended with status 1" in found
    found = [one["case"] for one in read_records(tmp_path / "r.jsonl")]
    assert found == ["moe_2048", "dense_2048", "dense_4096", "dense_8192"]


def test_a_pack_that_is_too_large_is_named_and_the_next_has_its_turn(monkeypatch, tmp_path, capsys):
    with_packs(monkeypatch, (2048, 4096))
    assert run(monkeypatch, tmp_path, "--models", "moe") == 1
    at_once, at_the_end = capsys.readouterr().out.splitlines()
    assert at_once == at_the_end == "moe_4096: OutOfMemoryError: made to fail"


def test_what_there_was_no_time_for_is_named(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, "--models", "dense", "--seconds", "-1") == 1
    assert "dense_4096: not measured, --seconds were over" in capsys.readouterr().out


def small_pack(lengths):
    return Pack(packs.pack(lengths), lengths, torch.ones(1, sum(lengths)))


def test_a_model_is_measured_in_every_mode(monkeypatch, tmp_path):
    """Without a GPU: the small model of the other tests, and the reference executor."""
    monkeypatch.setattr(language_model, "build_model", lambda shape: packs.new_model())
    monkeypatch.setattr(language_model, "make_pack", small_pack)
    monkeypatch.setattr(cases, "TrainingProcess", FakeProcess)
    with_packs(monkeypatch, (320, 480, 640))
    words = ["--models", "dense", "--repeats", "3", "--out", str(tmp_path / "r.jsonl")]
    monkeypatch.setattr("sys.argv", ["bench_packed.py", *words])
    bench_packed.main()
    records = read_records(tmp_path / "r.jsonl")
    modes = ("eager", "plugin", "plugin_4x")
    expected = [("dense_320", mode) for mode in (*modes, "plugin_layers")]
    expected += [(case, mode) for case in ("dense_480", "dense_640") for mode in modes]
    assert [(one["case"], one["mode"]) for one in records] == expected
    for one in records:
        check_record(one)
        assert one["mode"] == "eager" or not one["fallbacks"]
        assert one["mode"] != "plugin" or one["bit_equal"]
    assert [one["aim"] for one in records if one["mode"] == "plugin"] == [2.5, 1.6, 1.2]
    assert records[0]["gpu_busy_ms"] == 0 and records[2]["max_packed_seqs"] == 20


def small_plans(monkeypatch):
    """Packs that a small model on the CPU runs in no time."""
    monkeypatch.setattr(packed_plans, "PACK_SIZE", 640)
    monkeypatch.setattr(packed_plans, "KNOWN_PACKS", 40)
    monkeypatch.setattr(packed_plans, "MEASURED_KNOWN", 3)
    monkeypatch.setattr(packed_plans, "KNOWN_COUNTS", ((0.5, 3), (1.0, 6)))
    monkeypatch.setattr(packed_bench, "SHAPES", ((320, 1), (320, 4)))
    monkeypatch.setattr(language_model, "build_model", lambda shape: packs.new_model())
    monkeypatch.setattr(language_model, "make_pack", lambda lengths, seed=1: small_pack(lengths))
    monkeypatch.setattr(cases, "TrainingProcess", FakeProcess)
    monkeypatch.setattr("scripts.performance.models.tower.start_process", lambda: None)
    with_packs(monkeypatch, (480,))


def bench(monkeypatch, tmp_path, *words):
    out = tmp_path / "packed.jsonl"
    monkeypatch.setattr("sys.argv", ["bench_packed.py", "--models", "", "--out", str(out), *words])
    bench_packed.main()
    return read_records(out)


def test_forecasts_of_several_models_are_measured(monkeypatch, tmp_path, capsys):
    """Without a GPU: every choice that the planner has, by what it forecasts from the model's sizes."""
    small_plans(monkeypatch)
    words = ["--plans", "--planned", "dense,moe,mamba", "--distributions", "known"]
    records = bench(monkeypatch, tmp_path, *words)
    names = ("dense", "moe", "mamba")
    assert list(dict.fromkeys(one["case"] for one in records)) == [f"plan_{name}_known" for name in names]
    for name in names:
        found = {one["mode"]: one for one in records if one["case"] == f"plan_{name}_known"}
        assert {"plugin", "exhaustive_chosen"} <= set(found) and len(found) > 3
        assert found["plugin"]["fallbacks"] == {} and found["plugin"]["chosen"]
        best = packed_plans.Distribution("known", Bench(name).forecast()).best
        assert found["plugin"]["max_packed_seqs"] == best.max_packed_seqs
        for one in found.values():
            check_record(one)
    assert "measured" in capsys.readouterr().out


def Bench(name):
    made = object.__new__(packed_bench.Bench)
    made.lm, made.name = language_model, name
    return made


def test_measured_shapes_give_a_cost_model_and_records_for_the_rates(monkeypatch, tmp_path):
    from scripts.performance.packed.observations import observations

    small_plans(monkeypatch)
    costs = tmp_path / "costs.json"
    records = bench(monkeypatch, tmp_path, "--planned", "dense", "--cost-model", str(costs))
    expected = [f"costs_dense_{shape}" for shape in ("320x1", "320x4", "480x5")]
    assert [(one["case"], one["mode"]) for one in records] == [
        (case, mode) for case in expected for mode in ("eager", "plugin")
    ]
    for one in records:
        check_record(one)
        assert one["predicted_ms"] > 0
    assert load_cost_model(costs, "packed").origin.startswith("bench_packed.py, dense")
    monkeypatch.setattr("scripts.performance.packed.observations.PARALLEL", "packed.jsonl")
    found = observations(tmp_path)
    assert [(each.case, len(each.packs[0].lengths)) for each in found] == list(zip(expected, (1, 4, 5), strict=True))
    assert all(each.graphs_ms and each.eager_ms and each.memory_gb is not None for each in found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--planned", "dense,modle"], "must be of dense"),
        (["--distributions", "all"], "must be of mixed"),
        (["--planned", "dense,moe", "--cost-model", "c.json"], "--cost-model: it must have one model"),
    ],
)
def test_plans_that_cannot_be_measured_are_refused(monkeypatch, tmp_path, capsys, words, said):
    with pytest.raises(SystemExit):
        bench(monkeypatch, tmp_path, *words)
    assert said in capsys.readouterr().err


def full_capture():
    error = CaptureError("packed-sequence CUDA graphs could not be captured")
    error.__cause__ = OutOfMemoryInCapture("CUDA out of memory")
    return error


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), full_capture()], ids=["eager", "graphs"]
)
def test_without_memory_to_add_up_in_one_order_runs_are_compared(monkeypatch, capsys, error):
    monkeypatch.setattr(language_model, "build_model", lambda shape: packs.new_model())
    monkeypatch.setattr(language_model, "make_pack", small_pack)
    with_packs(monkeypatch, (320,))
    bench = packed_bench.Bench("dense", 3, False)
    monkeypatch.setattr(bench, "_to_the_bit", mock.Mock(side_effect=error))
    _, plugin, *_ = bench.pack(320)
    assert "bit_equal" not in plugin and plugin["grad_rel"] == plugin["grad_noise"] == plugin["forward_rel"] == 0
    assert f"dense_320: not compared to the bit: {type(error).__name__}" in capsys.readouterr().out
    assert not torch.are_deterministic_algorithms_enabled()


def test_another_failure_to_capture_is_the_records_error(monkeypatch):
    monkeypatch.setattr(language_model, "build_model", lambda shape: packs.new_model())
    monkeypatch.setattr(language_model, "make_pack", small_pack)
    with_packs(monkeypatch, (320,))
    bench = packed_bench.Bench("dense", 3, False)
    monkeypatch.setattr(bench, "_to_the_bit", mock.Mock(side_effect=CaptureError("no graph")))
    plugin = list(bench.pack(320))[1]
    assert plugin["error"] == "CaptureError: no graph"


def test_a_run_that_fails_leaves_no_graphs(monkeypatch):
    monkeypatch.setattr(language_model, "build_model", lambda shape: packs.new_model())
    monkeypatch.setattr(language_model, "make_pack", small_pack)
    bench = packed_bench.Bench("dense", 3, False)
    replays = bench._replayed(small_pack((100, 220)), 5, (), 2)
    next(replays)
    assert "forward" in vars(bench.model.decoder)
    monkeypatch.setattr(bench, "_results", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        next(replays)
    assert "forward" not in vars(bench.model.decoder)


def test_lengths_add_up():
    assert split(2048, 5) == (410, 410, 410, 409, 409)
    for documents in (1, 7, 24):
        lengths = draw(1500, documents, documents)
        assert sum(lengths) == 1500 and len(lengths) == documents and min(lengths) >= 1


@pytest.fixture(scope="module", params=packed_plans.DISTRIBUTIONS)
def distribution(request):
    return packed_plans.Distribution(request.param, DEFAULTS["packed"])


def test_every_choice_that_the_planner_has_is_measured(distribution):
    best = min(distribution.candidates, key=distribution.predicted_ms)
    assert distribution.chosen in distribution.candidates
    assert distribution.predicted_ms(distribution.chosen) <= 1.1 * distribution.predicted_ms(best)


def test_recordings_take_the_packs_that_run_on_them(distribution):
    places = distribution.places()
    assert list(places) == distribution.candidates
    for candidate, row in places.items():
        buckets = pack_buckets(candidate.buckets, candidate.bound)
        for pack, recording in zip(distribution.drawn, row, strict=True):
            found = place(pack, buckets)
            assert isinstance(found, Fallback) is (recording is None)
            if recording is not None:
                documents, longest = recording.limits
                assert recording.tokens == found.tokens and len(pack) <= documents and max(pack) <= longest
                assert scan_cost(documents, longest) == scan_cost(*found.limits)


def test_a_choices_time_is_that_of_its_packs(distribution):
    runs = []

    def run(number, recording):
        runs.append((number, recording))
        return 100.0 if recording is None else recording[0] / 100

    found = distribution.measured(run)
    assert len(runs) == len(set(runs))
    for candidate, row in distribution.places().items():
        expected = sum(100.0 if each is None else each[0] / 100 for each in row) / len(row)
        assert found[candidate] == pytest.approx(expected)
    made = packed_plans.records_of("plan_x", distribution, 40.0, found)
    for one in made:
        check_record({**one, **provenance(3, 0)})
    assert [one["mode"] for one in made[:2]] == ["plugin", "exhaustive_chosen"] and made[0]["ms"] == 40.0
    assert min(one["ms"] for one in made[1:]) == pytest.approx(min(found.values()))
