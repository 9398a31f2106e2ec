"""How soon a run's microbatches are on graphs after warm-up, and how many of them are."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.cli.runs.results import check_record
from scripts.performance.pages.results_page import captures
from scripts.performance.photographs.comparison import coverage_of, write
from scripts.performance.photographs.coverage import SETTLED_STEP, first_graphed_s, settled_graph_share


def run_of(warmup, steps, capture_between=0.0, capture_inside=0.0, between=0.5, step_s=2.0):
    """Return a run of one warm-up step after another and then steps with (replays, eager microbatches)."""
    counts, replays, eager, captured = [], 0, 0, 0.0
    for number, (replayed, ran) in enumerate([(0, 0)] * warmup + steps):
        first = number == warmup
        replays, eager = replays + replayed, eager + ran
        before = captured = captured + capture_between * first
        captured += capture_inside * first
        seconds = between * (number > 0) + capture_between * first
        counts.append({"replays": replays, "eager": eager, "capture_s_before": before, "capture_s": captured})
        counts[-1]["between_s"] = seconds
    return {"step_graphs": counts, "step_ms": [1e3 * step_s] * len(counts)}


@pytest.mark.parametrize("between, inside", [(3.0, 0.0), (0.0, 3.0)], ids=["newer releases", "releases before 0.5"])
def test_captures_count_where_ever_they_are(between, inside):
    run = run_of(3, [(4, 0)] * 5, capture_between=between, capture_inside=inside)
    assert first_graphed_s(run) == pytest.approx(0.5 + 3.0)


def test_steps_that_ran_eager_before_the_first_graphed_one_count():
    assert first_graphed_s(run_of(3, [(0, 4), (0, 4), (1, 3)])) == pytest.approx(3 * 0.5 + 2 * 2.0)


def test_what_is_not_known_is_not_told():
    untimed = {**run_of(1, [(4, 0)] * 20), "step_ms": None}
    assert coverage_of(untimed) == {"settled_graph_share": 1.0}
    assert coverage_of(run_of(3, [(0, 4)] * 3)) == {}
    assert coverage_of({"step_ms": [1.0], "graphs": None}) == {}  # of an older version of the job


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(any), min_size=SETTLED_STEP, max_size=30),
)
def test_the_share_is_of_the_tenth_step_after_warm_up_and_later(warmup, steps):
    late = steps[SETTLED_STEP - 1 :]
    share = sum(replays for replays, _ in late) / sum(map(sum, late))
    assert settled_graph_share(run_of(warmup, steps)) == pytest.approx(share)
    assert settled_graph_share(run_of(warmup, steps[: SETTLED_STEP - 1])) is None


def test_a_record_has_them_and_the_page_shows_them(tmp_path):
    path, graphs = tmp_path / "pretrain.jsonl", {"capture_seconds": 4.25, "longest_pause": 0.75}
    run = {**run_of(3, [(4, 0)] * 12, capture_between=2.25), "losses": [1.0] * 15, "grad_norms": [1.0] * 15}
    runs = {"eager1": {**run, **run_of(15, []), "graphs": None}, "graphs": {**run, "graphs": graphs}}
    write(path, {name: {**each, "peak_gb": 1.0} for name, each in runs.items()}, 1.0, True, "mixed")
    eager, graphed = map(json.loads, path.read_text().splitlines())
    check_record(graphed)
    assert "first_graphed_s" not in eager
    assert (graphed["first_graphed_s"], graphed["settled_graph_share"]) == (2.75, 1.0)
    assert captures([eager, graphed]).splitlines()[-1].split("|")[3:-1] == [" 4.2 ", " 2.8 ", " 0.8 ", " 100.0% "]
