"""The benchmark of captures without a GPU."""

import json
from pathlib import Path
from types import SimpleNamespace

from bridge_cg_plugin.cli.runs.results import read_records
from scripts.performance import bench_captures
from scripts.performance.records import check_record


def test_recordings_of_two_models_in_two_processes(monkeypatch, tmp_path):
    made = bench_captures.captures(24, 64)

    def in_this_process(child, env, **others):
        part = Path(child[child.index("--part") + 1])
        assert Path(env["TRITON_CACHE_DIR"]).parent == part.parent and child[-4:] == ["--small", "24", "--large", "64"]
        part.write_text(json.dumps(made))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(bench_captures, "subprocess", SimpleNamespace(run=in_this_process))
    out = tmp_path / "captures.jsonl"
    assert bench_captures.main(["--out", str(out), "--small", "24", "--large", "64"]) == 0
    found = read_records(out)
    cases = ["first_24", "later_64", "next_model_64", "later_24"]
    assert [(r["mode"], r["case"]) for r in found] == [(mode, case) for mode in ("cold", "warm") for case in cases]
    assert [r["repeats"] for r in found] == 2 * [1, *[bench_captures.REPEATS] * 3]
    for record in found:
        check_record(record)
        assert record["replays"] == record["repeats"] and record["grad_rel"] <= 1e-4 and record["ms"] > 0
