"""The page of several GPUs: its tables come from records of bench_parallel.py."""

import pytest

from bridge_cg_plugin.cli.runs.results import ROOT
from scripts.performance import bench_parallel
from scripts.performance.pages.layouts_page import distances, how_often_farthest, layout_parts, scaling, shares
from scripts.performance.pages.markdown import fill

from .idle_trainings import idle_trainings


@pytest.fixture
def started(monkeypatch):
    return idle_trainings(monkeypatch)


def tables(text):
    """Return the lines of each table by the names of its columns, a bar left at both ends."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("|"):
            header, _, *lines = block.splitlines()
            found.append([dict(zip(header.split(" | "), line.split(" | "), strict=True)) for line in lines])
    return found


def test_the_page_has_a_line_for_each_layout(started, tmp_path):
    out = tmp_path / "parallel.jsonl"
    words = ["--gpus", "2", "--steps", "8", "--out", str(out), "--microbatches", "3", "--layouts", "DP2", "one GPU"]
    assert bench_parallel.main(words) == 0
    cells, others = tables(layout_parts(tmp_path)["layouts"])
    assert [each["| layout"] for each in cells] == ["| one_GPU", "| DP2"]
    assert [each["ratio"] for each in cells] == ["**1.00**", "**0.78**"]
    assert [(each["eager scales"], each["graphs scale |"]) for each in others] == [
        ("1.00", "1.00 |"),
        ("0.62", "0.80 |"),
    ]
    assert others[1]["graphs peak GiB"] == "1.0/2.0"
    assert (cells[1]["losses"], cells[1]["gradient norms |"]) == ("0.00 (0.00)", "0.00 (0.00) |")
    assert layout_parts(tmp_path / "none")["layouts"].startswith("Not measured yet: `./run gpu-table`")


def test_the_page_holds_what_the_records_give():
    folder = ROOT / "docs/benchmarks"
    text = (folder / "parallel.md").read_text()
    assert fill(text, layout_parts(folder)) == text


def run_of(mode, losses):
    return {"case": "DP2", "mode": mode, "losses": losses, "grad_norms": [1.0, 1.0]}


def test_a_graphed_run_is_compared_as_each_eager_run_is():
    """Allowed is 1.5 of the spread that the others have up to a step."""
    eager = [run_of(f"eager{i + 1}", [4.0, loss]) for i, loss in enumerate((2.0, 2.01, 2.1))]
    near, far = run_of("plugin", [4.0, 2.005]), run_of("plugin", [4.0, 2.3])
    # 2.1 is 0.09 from 2.01, and the others span 0.01; 2.3 is 0.2 from 2.1, and those span 0.1.
    compared = [shares(run, [*eager, run]) for run in (near, far)]
    assert distances(compared[0]) == ["0.05 (9.00)", "0.00 (0.00)"]
    assert distances(compared[1]) == ["2.00 (0.30)", "0.00 (0.00)"]
    said = how_often_farthest(compared)
    assert said.startswith("The graphed run is farther from the others than any eager run in 1 of 4 comparisons;")
    assert said.endswith("by chance it would be in 1.")


def test_scaling_is_over_one_gpu_of_the_same_commit_and_microbatches():
    def run(case, ms, microbatches=2, commit="a"):
        return {"case": case, "ms": ms, "microbatches": microbatches, "versions": {"commit": commit}}

    alone = {"one_GPU_small": run("one_GPU_small", 5.0)}
    assert scaling(run("DP4_small", 8.0), alone) == "0.62" and scaling(alone["one_GPU_small"], alone) == "1.00"
    for other in (
        run("DP4", 8.0),
        run("DP4_small", 8.0, 8),
        run("DP4_small", 8.0, commit="b"),
        run("TP2_small", 8.0),
        run("DP2xPP2_small", 8.0),
        None,
    ):
        assert scaling(other, alone) == ""
