"""The benchmark of the host's time, without a GPU."""

import re

import pytest

from scripts.performance import bench_host
from scripts.performance.vision import host


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(host, "LAYERS", 2)
    monkeypatch.setattr(bench_host, "workloads", lambda names, tokens: {name: [(1, 4, 4), (2, 4, 2)] for name in names})


def test_phases_are_those_of_each_kind_of_microbatch_and_add_up(small, capsys):
    assert bench_host.main(["--cases", "mixed", "--steps", "3"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mixed ")]
    assert [line.split(":")[0] for line in lines] == [
        f"mixed {where}{kind}" for where in ("in a row", "idle") for kind in ("", ", first", ", awaited")
    ]
    for line in lines:
        phases = dict(re.findall(r"([a-z ]+) (-?\d+\.\d+)(?:,|$)", line.split(" = ")[1]))
        assert [name.strip() for name in phases] == list(host.PHASES)
        assert all(float(ms) >= 0 for ms in phases.values())
        assert (float(phases[" start of reductions"]) > 0) is line.startswith(("mixed in a row, aw", "mixed idle, aw"))


def test_an_unknown_case_is_named(capsys):
    assert bench_host.main(["--cases", "3x448"]) == 2
    assert "--cases 3x448: it must be any of 1x448" in capsys.readouterr().err
