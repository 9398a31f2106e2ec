"""`bridge-cg report`: what is read from records and logs, and the command."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.cli import main as cli
from bridge_cg_plugin.cli.report.page import make_page, to_markdown
from bridge_cg_plugin.cli.report.runs import GIB, KINDS, counts_of
from bridge_cg_plugin.cli.report.sources import read_graphs, read_runs, runs_in
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.planning.buckets import Bucket
from bridge_cg_plugin.graphs.reports.report import render, render_steps
from bridge_cg_plugin.graphs.reports.statistics import BucketStatistics, EagerRun, RegionStatistics
from bridge_cg_plugin.options import OptionError

from .reported import statistics

ROOT = Path(__file__).resolve().parents[2]
LOG = Path(__file__).parent / "report_inputs" / "training.log"
PRETRAIN = ROOT / "docs/benchmarks/pretrain.jsonl"
RECORDS = [json.loads(line) for line in PRETRAIN.read_text().splitlines()]


def test_what_happened_between_two_looks_is_two_lines():
    before, now = statistics(), statistics()
    now.buckets[Bucket(1024, (32, 1024))].replays += 30
    now.buckets[Bucket(1024, (32, 1024))].tokens += 900
    now.buckets[Bucket(1024, (32, 1024))].padding += 100
    now.fell_back("vision_encoder", Fallback.TOO_MANY_TOKENS, 9000)
    now.fell_back("vision_encoder", Fallback.NO_FREE_SLOT)
    now.fell_back("vision_encoder", Fallback.NO_FREE_SLOT)
    other = RegionStatistics(static_bytes=5 * GIB)
    first, second = render_steps([now, other], before, "vision, steps 101 to 200").splitlines()
    assert first == ("vision, steps 101 to 200: 30 of 33 microbatches replayed (90.9%), padding 10.0%, 5.00 GiB")
    assert second.startswith("  ran eager: no_free_slot 2, too_many_tokens 1. Remedy of no_free_slot: raise")


def test_reports_between_steps_leave_the_last_one_readable(tmp_path):
    short = render_steps([statistics()], RegionStatistics(), "vision_cuda_graph, steps 1 to 100")
    path = log_with_report(tmp_path)
    expected = read_graphs(line.partition("[bridge-cg] ")[2] for line in path.read_text().splitlines())
    lines = [*short.splitlines(), *(line.partition("[bridge-cg] ")[2] for line in path.read_text().splitlines())]
    assert read_graphs(lines) == expected and expected


def log_with_report(folder):
    report = render(statistics(), "vision CUDA graphs", {"plan": "3 buckets"})
    lines = [f"[rank0]: [bridge-cg] {line}" for line in report.splitlines()]
    path = folder / "graphs.log"
    path.write_text(LOG.read_text() + "\n".join(lines) + "\n")
    return path


# Logs


def test_a_log_gives_losses_norms_times_throughput_and_memory():
    (found,) = read_runs([str(LOG)])
    assert found.losses == ((10, 8.252446), (20, 4.279747), (30, 0.1246484))
    assert found.grad_norms == ((10, 5.982), (20, 9.739), (30, 4.563))
    assert found.times == ((10, 1210.5), (20, 300.0), (30, 320.0))
    assert found.samples_per_s == pytest.approx(8 / 0.62)
    assert found.tflops_per_gpu == pytest.approx(395.0)
    assert found.peak_gb == pytest.approx(34.652e9 / GIB)


def test_a_log_has_what_the_plugin_reported(tmp_path):
    (found,) = read_runs([str(log_with_report(tmp_path))])
    counts = found.graphs["vision"]
    assert (counts.replays, counts.unused_buckets, counts.warmup_microbatches) == (29, 1, 12)
    assert counts.fallbacks == {"too_many_tokens": 3, "no_free_slot": 1}
    assert [b.name for b in counts.buckets] == ["1024/32/1024", "2048/32/1024"]
    assert counts.buckets[0].padding_share == 0.25
    assert counts.capture_s == 3.2 and counts.memory_gb == 1.25


counted = st.builds(
    BucketStatistics,
    replays=st.integers(0, 10**6),
    evaluations=st.integers(0, 10**6),
    tokens=st.integers(0, 10**9),
    padding=st.integers(0, 10**9),
)
regions = st.builds(
    RegionStatistics,
    buckets=st.dictionaries(
        st.builds(lambda t, a, b: Bucket(t, (a, b)), st.integers(1, 2**20), st.integers(1, 512), st.integers(1, 2**20)),
        counted,
        max_size=6,
    ),
    fallbacks=st.dictionaries(st.sampled_from(Fallback), st.integers(1, 99)).map(Counter),
    last_fallbacks=st.lists(st.builds(EagerRun, st.integers(0), st.sampled_from(Fallback), st.none() | st.integers(1))),
    warmup_microbatches=st.integers(0, 10**6),
    capture_seconds=st.floats(0, 1e4),
    graph_bytes=st.integers(0, 100 * GIB),
    static_bytes=st.integers(0, 100 * GIB),
)


@given(regions, st.sampled_from([(kind.title, kind.name) for kind in KINDS]))
def test_every_report_of_the_plugin_is_read_as_it_was_counted(found, names):
    title, model = names
    read = read_graphs(render(found, title, {"plan": "1 2 3"}).splitlines())[model]
    meant = counts_of(found.as_dict())
    assert (read.replays, read.unused_buckets, dict(read.fallbacks)) == (
        *(meant.replays, meant.unused_buckets),
        dict(meant.fallbacks),
    )
    assert read.warmup_microbatches == meant.warmup_microbatches
    assert read.padding_share == pytest.approx(meant.padding_share, abs=6e-4)
    assert read.memory_gb == pytest.approx(meant.memory_gb, abs=6e-3)
    assert [(b.name, b.replays, b.evaluations) for b in read.buckets] == [
        (b.name, b.replays, b.evaluations) for b in meant.buckets
    ]


# The plugin's report


def test_the_report_has_the_last_fallbacks_and_the_remedy_of_the_most_frequent():
    lines = render(statistics(), "vision CUDA graphs").splitlines()
    place = lines.index("eager fallbacks: no_free_slot 1, too_many_tokens 3")
    last = [f"step 7 too_many_tokens ({tokens} tokens)" for tokens in (5000, 6000, 7000)]
    assert lines[place + 1] == f"last fallbacks: {', '.join(last)}, step 7 no_free_slot"
    remedy = "raise max_vision_cuda_graph_seq_length, or add a bucket (vision_cuda_graph_buckets"
    assert lines[place + 2].startswith(f"remedy of too_many_tokens: {remedy}")
    assert "last fallbacks" not in render(RegionStatistics(), "vision CUDA graphs")


# Records


def test_the_committed_records_make_a_page_per_release():
    page = make_page(runs_in(PRETRAIN))
    assert {"mixed 0.6.2", "mixed 0.4.2"} <= {run.case for run in page.runs}
    assert {run.peak_tflops for run in page.runs} == {989.4}
    graphed = next(run for run in page.runs if run.mode == "plugin" and run.case == "mixed 0.6.2")
    record = next(
        r
        for r in RECORDS
        if (r["case"], r["mode"]) == ("mixed", "plugin") and r["versions"]["megatron-bridge"] == "0.6.2"
    )
    assert graphed.graphs["vision"].replays == record["graphs"]["replays"] > 0
    text = to_markdown(page)
    assert f"| mixed 0.6.2: plugin | {record['ms']:.1f} | {record['ratio']:.2f} |" in text
    assert "## Graphs" in text and str(record["graphs"]["replays"]) in text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", r"runs\.jsonl:2 as a benchmark record: it is no JSON"),
        ('{"mode": "eager", "versions": {}}', "'case' is missing or no str"),
        (
            '{"case": "a", "mode": "plugin", "versions": {}, "losses": [1], "graphs": {"buckets": {}}}',
            "'graphs' has no statistics of this version .KeyError: 'replays'.",
        ),
    ],
)
def test_a_broken_record_is_refused_with_its_line(tmp_path, line, says):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"case": "a", "mode": "eager", "versions": {}, "losses": [1.0]}\n' + line + "\n")
    with pytest.raises(OptionError, match=says):
        read_runs([str(path)])


# Inputs


def test_a_folder_gives_the_training_runs_of_its_files(tmp_path):
    (tmp_path / "bench.jsonl").write_text('{"case": "a", "mode": "eager", "versions": {}, "ms": 3}')
    with pytest.raises(OptionError, match="Cannot report .*: it has no training runs"):
        read_runs([str(tmp_path)])
    (tmp_path / "runs.jsonl").write_text(PRETRAIN.read_text())
    assert len(read_runs([str(tmp_path)])) == len(RECORDS)
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(OptionError, match=r"broken\.jsonl:1"):
        read_runs([str(tmp_path)])


def test_the_folder_of_the_published_measurements_has_a_page(capsys):
    assert cli.main(["report", str(ROOT / "docs/benchmarks"), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert len(runs) > 50 and not any("compile" in run["mode"] for run in runs)


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


# The command


def test_the_command_prints_and_writes(tmp_path, capsys):
    text = tmp_path / "deep" / "page.md"
    assert cli.main(["report", str(PRETRAIN), "--markdown", str(text)]) == 0
    said = capsys.readouterr().out
    assert "Step time" in said and "SAME mixed 0.6.2: plugin" in said
    assert text.read_text().startswith("# pretrain.jsonl")


@pytest.mark.parametrize("name", ["\u4e2d.jsonl".encode(), b"\xff.jsonl"], ids=["text", "no_text"])
def test_pages_are_utf_8_whatever_the_language(tmp_path, name):
    given, page = os.fsencode(tmp_path) + b"/" + name, tmp_path / "page.md"
    Path(os.fsdecode(given)).write_bytes(PRETRAIN.read_bytes())
    words = ["report", given, "--markdown", str(page), "--json"]
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "bridge_cg_plugin.cli.main", *words]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env={**os.environ, **ascii_alone})
    shown = name.decode(errors="replace")
    assert shown in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "Cannot read nowhere: it does not exist"),
        ([str(LOG), "--peak-tflops", "0"], "Cannot use --peak-tflops 0: it must be a number above 0"),
        ([str(LOG), "--markdown", str(LOG / "below")], "Cannot write "),
    ],
)
def test_refused_input_is_status_2_and_one_line(words, says, capsys):
    assert cli.main(["report", *words]) == 2
    said = capsys.readouterr()
    assert says in said.err and not said.out and len(said.err.splitlines()) == 1


def test_loading_the_report_imports_neither_torch_nor_megatron():
    code = "import sys; from bridge_cg_plugin.cli.report import page; print({'torch', 'megatron'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "set()", done.stderr
