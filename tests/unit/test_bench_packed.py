"""What the benchmark of packed documents makes of its measurements."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge_cg_plugin.graphs.buckets import scan_cost
from bridge_cg_plugin.planner.cost import DEFAULTS
from scripts.performance import bench_packed
from scripts.performance.bench_packed import DISTRIBUTIONS, WANTED, failures, measured_choices, plan_packs_time
from scripts.performance.language_model import SHAPES, draw, split
from scripts.performance.packed_costs import Measured, fit, non_negative
from scripts.performance.results import check_record, provenance


def record(case="dense_2048", mode="plugin", **changes):
    values = {
        "case": case,
        "mode": mode,
        "tokens": 2048,
        "documents": 5,
        "ms": 30.0,
        "ratio": 0.3,
        "forward_rel": 0.0,
        "grad_rel": 1e-3,
        "forward_noise": 0.0,
        "grad_noise": 1e-3,
        "fallbacks": {},
        **provenance(3, 0),
    }
    made = {**values, **changes}
    check_record(made)
    return made


def plan(ms, predicted, chosen, bound):
    return record("plan_short", f"plugin_{bound}", ms=ms, predicted_ms=predicted, chosen=chosen, max_packed_seqs=bound)


GOOD = [
    record(mode="eager", ms=100.0, ratio=1.0),
    record(),
    record(mode="plugin_4x", ms=30.5, ratio=0.305, max_packed_seqs=20),
    plan(50.0, 52.0, True, 16),
    plan(49.0, 70.0, False, 32),
]


def test_what_is_wanted_passes():
    assert failures(GOOD) == []
    assert set(WANTED) == set(SHAPES)


@pytest.mark.parametrize(
    "index, changes, message",
    [
        (1, {"ratio": 0.5}, "dense_2048: 2.00 times as fast as eager, wanted 2.5"),
        (1, {"fallbacks": {"too_many_tokens": 1}}, "too_many_tokens"),
        (1, {"grad_rel": 1.6e-3}, "gradients differ by 1.60e-03, eager runs by 1.00e-03"),
        (1, {"grad_rel": float("nan")}, "gradients differ by nan"),
        (1, {"forward_rel": 1e-6}, "losses differ by 1.00e-06, eager runs by 0.00e+00"),
        (2, {"ms": 31.0}, "cost more than 3 %"),
        (3, {"predicted_ms": 60.0}, "predicted 60.0 ms, measured 50.0 ms"),
        (4, {"ms": 40.0}, "the choice takes 50.0 ms, the best 40.0"),
        (2, {"error": "CaptureError: no memory"}, "dense_2048, plugin_4x: CaptureError: no memory"),
        (3, {"chosen": False}, "the recommended choice was not measured"),
    ],
)
def test_what_misses_it_is_named(index, changes, message):
    records = [{**r, **changes} if i == index else r for i, r in enumerate(GOOD)]
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
    packs = []
    for tokens, documents in (*bench_packed.SHAPES, *((n, 5) for n in bench_packed.TOKENS)):
        lengths = split(tokens, documents)
        limits = max(documents, 32), max(lengths)
        busy = known.busy_ms(tokens, lengths, *limits)
        memory = known.memory_gb(tokens) * 1024
        packs.append(Measured(lengths, limits, known.eager_ms(lengths), busy, busy, memory))
    found = fit(packs, "test")
    for pack in packs:
        assert found.graph_ms(pack.tokens, pack.lengths, *pack.limits) == pytest.approx(pack.graphs_ms, rel=1e-6)
        assert found.memory_gb(pack.tokens) == pytest.approx(known.memory_gb(pack.tokens))
    assert found.per_row_ms == pytest.approx(known.per_row_ms) and scan_cost(*packs[0].limits) > 0


@pytest.mark.parametrize("best, expected", [(3, [3, 2, 4, 0]), (0, [0, 1, 2, 3]), (5, [5, 4, 0, 1])])
def test_the_choices_around_the_recommended_one_are_measured(best, expected):
    choices = list(range(6))
    assert measured_choices(SimpleNamespace(choices=choices, best=best)) == expected


class FakeBench:
    """Measures nothing, in no time."""

    def __init__(self, name, repeats, fused_rope):
        self.name = name

    def cases(self, packs, cost_model, plans):
        for tokens in bench_packed.TOKENS:
            yield f"{self.name}_{tokens}", lambda tokens=tokens: iter([record(f"{self.name}_{tokens}", tokens=tokens)])

    def close(self):
        pass


def run(monkeypatch, tmp_path, *words):
    from scripts.performance import tower

    monkeypatch.setattr(tower, "start_process", lambda: None)
    monkeypatch.setattr(bench_packed, "Bench", FakeBench)
    monkeypatch.setattr("sys.argv", ["bench_packed.py", "--out", str(tmp_path / "r.jsonl"), *words])
    return bench_packed.main()


def test_records_are_written_as_they_come(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, "--models", "dense") == 0
    assert len(Path(tmp_path / "r.jsonl").read_text().splitlines()) == 3
    assert "all 3 records inside their limits" in capsys.readouterr().out


def test_what_there_was_no_time_for_is_named(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path, "--models", "dense", "--seconds", "-1") == 1
    assert "dense_4096: not measured, --seconds were over" in capsys.readouterr().out


def test_lengths_add_up():
    assert split(2048, 5) == (410, 410, 410, 409, 409)
    for documents in (1, 7, 24):
        lengths = draw(1500, documents, documents)
        assert sum(lengths) == 1500 and len(lengths) == documents and min(lengths) >= 1


def test_distributions_can_be_planned():
    import random

    from bridge_cg_plugin.planner.cost import DEFAULTS
    from bridge_cg_plugin.planner.packing import first_fit_shuffle
    from bridge_cg_plugin.planner.plan import plan_packs

    for values, weights in DISTRIBUTIONS.values():
        packs = first_fit_shuffle(random.Random(0).choices(values, weights, k=400), 4096)
        made = plan_packs(packs, DEFAULTS["packed"])
        assert plan_packs_time(packs, DEFAULTS["packed"], made.best) == pytest.approx(made.best.step_ms)
