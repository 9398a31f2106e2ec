"""What the benchmark of packed documents makes of its measurements."""

import numpy as np
import pytest

from scripts.performance.bench_packed import DISTRIBUTIONS, WANTED, _non_negative, failures, plan_packs_time
from scripts.performance.language_model import SHAPES, draw, split
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
        (1, {"grad_rel": 0.5}, "gradients differ by 5.00e-01"),
        (1, {"grad_rel": float("nan")}, "gradients differ by nan"),
        (1, {"forward_rel": 0.01}, "losses differ by 1.00e-02"),
        (2, {"ms": 31.0}, "cost more than 3 %"),
        (3, {"predicted_ms": 60.0}, "predicted 60.0 ms, measured 50.0 ms"),
        (4, {"ms": 40.0}, "the choice takes 50.0 ms, the best 40.0"),
    ],
)
def test_what_misses_it_is_named(index, changes, message):
    records = [{**r, **changes} if i == index else r for i, r in enumerate(GOOD)]
    (found,) = failures(records)
    assert message in found


def test_the_fit_has_no_weight_below_zero():
    rows = np.array([[1.0, x, x * x] for x in range(1, 9)])
    assert _non_negative(rows, rows @ [3.0, 2.0, 0.5]) == pytest.approx([3.0, 2.0, 0.5])
    found = _non_negative(rows, rows @ [3.0, 2.0, -0.1])
    assert min(found) == 0.0 and found[1] > 0


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
