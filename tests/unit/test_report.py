"""`bridge-cg report`: what is read from records and logs, verdicts, pages, and the command."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.cli import main as cli
from bridge_cg_plugin.cli.report.page import make_page, to_json, to_markdown
from bridge_cg_plugin.cli.report.runs import GIB, KINDS, Run, counts_of, verdicts
from bridge_cg_plugin.cli.report.sources import read_graphs, read_runs
from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.reports import BucketStatistics, RegionStatistics, render, render_steps
from bridge_cg_plugin.options import OptionError

ROOT = Path(__file__).resolve().parents[2]
LOG = Path(__file__).parent / "report_inputs" / "training.log"
PRETRAIN = ROOT / "docs/benchmarks/pretrain.jsonl"
RECORDS = [json.loads(line) for line in PRETRAIN.read_text().splitlines()]


regions = st.builds(
    RegionStatistics,
    buckets=st.dictionaries(
        st.builds(lambda t, a, b: Bucket(t, (a, b)), st.integers(1, 2**20), st.integers(1, 512), st.integers(1, 2**20)),
        st.builds(
            BucketStatistics,
            **dict.fromkeys(("replays", "evaluations"), st.integers(0, 10**6)),
            **dict.fromkeys(("tokens", "padding"), st.integers(0, 10**9)),
        ),
        max_size=6,
    ),
    fallbacks=st.dictionaries(st.sampled_from(Fallback), st.integers(1, 99)).map(Counter),
    warmup_microbatches=st.integers(0, 10**6),
    capture_seconds=st.floats(0, 1e4),
    graph_bytes=st.integers(0, 100 * GIB),
    static_bytes=st.integers(0, 100 * GIB),
)


@given(regions, st.sampled_from([(kind.title, kind.name) for kind in KINDS]))
def test_every_report_of_the_plugin_is_read_as_it_was_counted(found, names):
    title, model = names
    short = render_steps([found], f"{title}, 100 steps")
    read = read_graphs([*short.splitlines(), *render(found, title, {"plan": "1 2 3"}).splitlines()])[model]
    meant = counts_of(found.as_dict())
    assert (read.replays, read.fallbacks) == (meant.replays, meant.fallbacks)
    assert read.warmup_microbatches == meant.warmup_microbatches
    assert read.padding_share == pytest.approx(meant.padding_share, abs=6e-4)
    assert read.memory_gb == pytest.approx(meant.memory_gb, abs=6e-3)


def statistics():
    found = RegionStatistics(graph_bytes=GIB, static_bytes=GIB // 4, capture_seconds=3.25, warmup_microbatches=12)
    found.buckets[Bucket(1024, (32, 1024))] = BucketStatistics(replays=24, tokens=600, padding=200)
    found.buckets[Bucket(2048, (32, 1024))] = BucketStatistics(replays=3, evaluations=2, tokens=900, padding=100)
    found.buckets[Bucket(4096, (32, 1024))] = BucketStatistics()
    found.step = 7
    for tokens in (5000, 6000, 7000):
        found.fell_back("vision_encoder", Fallback.TOO_MANY_TOKENS, tokens)
    found.fell_back("vision_encoder", Fallback.NO_FREE_SLOT)
    return found


def run(mode, losses=(3.0, 2.0, 1.0), **fields):
    return Run(case="c", mode=mode, losses=tuple(enumerate(losses, 1)), **fields)


# Inputs


def test_a_log_has_what_the_loop_and_the_plugin_reported(tmp_path):
    lines = render(statistics(), "vision CUDA graphs", {"plan": "3 buckets"}).splitlines()
    path = tmp_path / "graphs.log"
    path.write_text("\n".join([LOG.read_text(), *(f"[rank0]: [bridge-cg] {line}" for line in lines)]))
    (found,) = read_runs([str(path)])
    assert found.losses == ((10, 8.252446), (20, 4.279747), (30, 0.1246484))
    assert found.grad_norms == ((10, 5.982), (20, 9.739), (30, 4.563))
    assert found.times == ((10, 1210.5), (20, 300.0), (30, 320.0))
    assert (found.samples_per_s, found.tflops_per_gpu) == (pytest.approx(8 / 0.62), pytest.approx(395.0))
    assert found.peak_gb == pytest.approx(34.652e9 / GIB)
    counts = found.graphs["vision"]
    assert (counts.replays, counts.warmup_microbatches, counts.capture_s, counts.memory_gb) == (29, 12, 3.2, 1.25)
    assert counts.fallbacks == {"too_many_tokens": 3, "no_free_slot": 1}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", r"runs\.jsonl:2 as a benchmark record: it is no JSON"),
        ('{"mode": "eager", "versions": {}}', "KeyError: 'case'"),
        ('{"case": "a", "mode": "b", "versions": {}, "graphs": {"buckets": {}}}', "KeyError: 'replays'"),
        ('{"case": "a", "mode": "b", "versions": {}, "losses": ["x"]}', "ValueError"),
    ],
)
def test_a_broken_record_is_refused_with_its_line(tmp_path, line, says):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"case": "a", "mode": "eager", "versions": {}, "losses": [1.0]}\n' + line + "\n")
    with pytest.raises(OptionError, match=says):
        read_runs([str(path)])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.log"], "Cannot read nowhere.log: it does not exist"),
        ([str(LOG), str(LOG)], "two runs that are both named .*eager1=a.log"),
        ([f"plugin={PRETRAIN}"], f"the file has {len(RECORDS)} runs. Write PATH alone"),
        ([str(ROOT / "docs/benchmarks/format.md")], "iteration N"),
        ([str(ROOT / "recipes")], "it has no .jsonl records. Name a file of records or the log"),
    ],
)
def test_inputs_that_cannot_be_read_are_refused(words, says):
    with pytest.raises(OptionError, match=says):
        read_runs(words)


# Verdicts and pages


def test_a_run_outside_is_different_and_the_step_is_named():
    runs = [run("eager1"), run("eager2", (3.0, 2.1, 1.0)), run("plugin", (3.0, 2.05, 1.0))]
    inside, outside = verdicts([*runs, run("upstream", (3.0, 2.6, 1.0))])
    assert inside.state == "same" and "gradient norms" not in inside.reason
    assert outside.state == "different" and "at step 2" in outside.reason
    assert outside.reason.endswith("1 is the limit. 2 eager runs say little of what eager can do: give more.")


@pytest.mark.parametrize(
    ("runs", "says"),
    [
        ([run("eager1"), run("plugin")], "here are 1"),
        ([run("eager1"), run("eager2", error="broke"), run("plugin")], "here are 1, and 1 failed"),
        ([run("eager1"), run("eager2"), run("plugin", error="out of memory")], "failed: out of memory"),
        ([run("eager1"), run("eager2"), run("plugin", (3.0, 2.0))], "different steps .*plugin 2"),
        ([run("eager1", ()), run("eager2", ()), run("plugin", ())], "different steps"),
        (
            [run("eager1"), run("eager2"), run("plugin", graphs={"vision": counts_of(RegionStatistics().as_dict())})],
            "Nothing was replayed",
        ),
    ],
)
def test_without_a_fair_comparison_there_is_no_verdict(runs, says):
    (found,) = verdicts(runs)
    assert found.state == "unknown" and re.search(says, found.reason)


def test_a_nan_is_different_and_null_in_json():
    nan = float("nan")
    page = make_page([run("eager1"), run("eager2"), run("plugin", (3.0, nan, nan))])
    assert page.verdicts[0].state == "different"
    assert json.loads(to_json(page))["runs"][2]["losses"] == [[1, 3.0], [2, None], [3, None]]


def test_markdown_has_everything():
    times = tuple((step, 500.0 + step) for step in range(1, 21))
    graphed = {"vision": counts_of(statistics().as_dict())}
    runs = [
        run("eager1", times=times, gpu="NVIDIA H200", samples_per_s=12.5, tokens_per_s=16384.0),
        run("eager2", times=times, tflops_per_gpu=500.0, peak_gb=32.0),
        run("plugin", times=tuple((step, ms / 2) for step, ms in times), graphs=graphed),
        run("upstream", (3.0, 9.0, 9.0), times=times, wrong="computes another function: <no> rotary embedding"),
        Run(case="c", mode="broken", error="RuntimeError: a | b"),
    ]
    text = to_markdown(make_page(runs, "A <page>"))
    for part in (
        *("# A <page>", "NVIDIA H200", "**SAME** plugin", "**DIFFERENT** upstream", "**NO VERDICT** broken"),
        *("failed: RuntimeError: a \\| b", "computes another function", "12.50", "16,384", "500.0", "32.0"),
        *("no_free_slot 1, too_many_tokens 3", "| plugin | 256.8 | 0.50 |"),
    ):
        assert part in text


# The command


def test_the_command_prints_and_writes(tmp_path, capsys):
    text = tmp_path / "deep" / "page.md"
    assert cli.main(["report", str(PRETRAIN), "--markdown", str(text)]) == 0
    said = capsys.readouterr().out
    assert "Step time" in said and "SAME mixed 0.6.2: plugin" in said
    assert text.read_text().startswith("# pretrain.jsonl")
    assert cli.main(["report", str(PRETRAIN), "--markdown", str(text / "below")]) == 2
    assert "Cannot write " in capsys.readouterr().err


def test_the_folder_of_the_published_measurements_has_a_page(capsys):
    assert cli.main(["report", str(ROOT / "docs/benchmarks"), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert len(runs) > 50 and not any("compile" in run["mode"] for run in runs)
