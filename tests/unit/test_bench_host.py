"""The benchmark of the host's time, without a GPU."""

import re

from scripts.performance import bench_host


def test_each_kind_of_microbatch_has_a_time(monkeypatch, capsys):
    monkeypatch.setattr(bench_host, "LAYERS", 2)
    monkeypatch.setitem(bench_host.CASES, "mixed", [(1, 4, 4), (2, 4, 2)])
    assert bench_host.main(["--cases", "mixed", "--steps", "3"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mixed ")]
    assert [line.split(":")[0] for line in lines] == ["mixed in a row", "mixed idle"]
    assert all(len([ms for ms in re.findall(r"(\d+\.\d+) ms", line) if float(ms) > 0]) == 3 for line in lines)
