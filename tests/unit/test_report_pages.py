"""Verdicts of a report, and its pages in Markdown and JSON."""

import json
import re

import pytest

from bridge_cg_plugin.cli.report.page import make_page, to_json, to_markdown
from bridge_cg_plugin.cli.report.runs import Run, counts_of, verdicts
from bridge_cg_plugin.graphs.reports.statistics import RegionStatistics

from .reported import run, statistics


def test_a_run_inside_the_spread_is_the_same():
    (found,) = verdicts([run("eager1"), run("eager2", (3.0, 2.1, 1.0)), run("plugin", (3.0, 2.05, 1.0))])
    assert (found.state, found.norm) == ("same", None)


def test_a_run_outside_is_different_and_the_step_is_named():
    (found,) = verdicts([run("eager1"), run("eager2", (3.0, 2.1, 1.0)), run("upstream", (3.0, 2.6, 1.0))])
    assert found.state == "different" and "at step 2" in found.reason
    assert found.reason.endswith("1 is the limit. 2 eager runs say little of what eager can do: give more.")


def test_gradient_norms_count_too():
    def with_norms(mode, *norms):
        return run(mode, grad_norms=tuple(enumerate(norms, 1)))

    (found,) = verdicts([with_norms("eager1", 1, 1, 1), with_norms("eager2", 1, 1, 1), with_norms("plugin", 1, 2, 1)])
    assert found.state == "different" and found.loss.inside and not found.norm.inside


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        ([run("eager1"), run("plugin")], "here are 1"),
        ([run("eager1"), run("eager2", error="broke"), run("plugin")], "here are 1, and 1 failed"),
        ([run("eager1"), run("eager2"), run("plugin", error="out of memory")], "failed: out of memory"),
        ([run("eager1"), run("eager2"), run("plugin", (3.0, 2.0))], "different steps .*plugin 2"),
        ([run("eager1", ()), run("eager2", ()), run("plugin", ())], "different steps"),
    ],
)
def test_without_a_fair_comparison_there_is_no_verdict(runs, says):
    (found,) = verdicts(runs)
    assert found.state == "unknown"
    assert re.search(says, found.reason)


def test_graphs_that_never_replayed_prove_nothing():
    idle = counts_of(RegionStatistics().as_dict())
    (found,) = verdicts([run("eager1"), run("eager2"), run("plugin", graphs={"vision": idle})])
    assert found.state == "unknown" and "Nothing was replayed" in found.reason


def test_a_nan_is_different_and_null_in_json():
    nan = float("nan")
    page = make_page([run("eager1"), run("eager2"), run("plugin", (3.0, nan, nan))])
    assert page.verdicts[0].state == "different"
    assert json.loads(to_json(page))["runs"][2]["losses"] == [[1, 3.0], [2, None], [3, None]]


TIMES = tuple((step, 500.0 + step) for step in range(1, 21))


def whole_page():
    graphed = {"vision": counts_of(statistics().as_dict())}
    wrong = "computes another function: <no> rotary embedding"
    return make_page(
        [
            run("eager1", times=TIMES, gpu="NVIDIA H200", images_per_s=12.5, tokens_per_s=16384.0),
            run("eager2", times=TIMES, tflops_per_gpu=500.0, peak_tflops=1000.0, peak_gb=32.0),
            run("plugin", times=tuple((step, ms / 2) for step, ms in TIMES), graphs=graphed),
            run("upstream", (3.0, 9.0, 9.0), times=TIMES, wrong=wrong),
            Run(case="c", mode="broken", error="RuntimeError: a | b"),
        ],
        "A <page>",
    )


def test_markdown_has_everything():
    text = to_markdown(whole_page())
    for part in ("# A <page>", "NVIDIA H200", "**SAME** plugin", "**DIFFERENT** upstream", "**NO VERDICT** broken"):
        assert part in text
    for part in ("failed: RuntimeError: a \\| b", "computes another function", "12.50", "16,384", "50.0%", "32.0"):
        assert part in text
    for part in ("no_free_slot 1, too_many_tokens 3", "1024/32/1024", "25.0%", "1 more were captured and not used"):
        assert part in text
    assert "| plugin | 256.8 | 0.50 |" in text
