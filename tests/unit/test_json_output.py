"""Standard output of a `--json` command is one JSON value, whatever else prints, from Python or from C."""

import ctypes
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_cg_plugin import plugin
from bridge_cg_plugin.cli import audit, doctor
from bridge_cg_plugin.cli import main as cli
from bridge_cg_plugin.cli.planner import command as planner
from bridge_cg_plugin.cli.report import page as reports
from bridge_cg_plugin.options import explain

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "docs" / "benchmarks" / "pretrain.jsonl"
LOUD = """
import atexit, ctypes, logging, os, sys
print("LOUD python")
os.write(1, b"LOUD descriptor\\n")
ctypes.CDLL(None).puts(b"LOUD C")
handler = logging.StreamHandler(sys.stdout)
handler.emit(logging.makeLogRecord({"msg": "LOUD log"}))
sys.__stdout__.write("LOUD original object\\n")
atexit.register(print, "LOUD end", file=sys.__stdout__)
"""


def loud(function):
    """Return a function that prints in every way before it does its work."""

    def printing(*args, **kwargs):
        print("LOUD python")
        os.write(1, b"LOUD descriptor\n")
        ctypes.CDLL(None).puts(b"LOUD C")
        return function(*args, **kwargs)

    return printing


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text('{"100": 50, "900": 5}')
    return path


@pytest.mark.parametrize(
    "words, owner, name",
    [
        (["doctor", "--no-gpu"], doctor, "diagnose"),
        (["audit"], audit, "audit"),
        (["explain", "cuda_graph_impl=none"], explain, "as_json"),
        (["plan", "packed", "LENGTHS", "--pack-size", "1024"], planner, "read_documents"),
        (["report", str(RUN)], reports, "read_runs"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_only_the_answer_goes_to_standard_output(monkeypatch, capfd, lengths, words, owner, name):
    empty = {doctor: doctor.Diagnosis(), audit: audit.Audit()}
    monkeypatch.setattr(owner, name, loud((lambda *_: empty[owner]) if owner in empty else getattr(owner, name)))
    words = [str(lengths) if word == "LENGTHS" else word for word in words]
    assert cli.main([*words, "--json"]) == 0
    out, err = capfd.readouterr()
    assert isinstance(json.loads(out), dict)
    for way in ("python", "descriptor", "C"):
        assert err.count(f"LOUD {way}\n") == 1 and f"LOUD {way}" not in out
    print("standard output is the caller's again")
    os.write(1, b"and the descriptor\n")
    assert capfd.readouterr().out.splitlines() == ["standard output is the caller's again", "and the descriptor"]


PRINTED = [
    ["report", str(RUN)],
    ["plan", "packed", "LENGTHS", "--pack-size", "1024"],
    ["compare", "--recipe", "qwen3_vl_8b_vision_graphs_h200_pretrain_mock_config", "--gpus_per_node=4", "--dry-run"],
]


@pytest.mark.parametrize(
    ("words", "redirected", "ends"),
    [
        (PRINTED[0], "| true", (0, "")),
        (PRINTED[1], ">&- 2>&-", (0, "")),
        (PRINTED[0], ">/dev/full", (2, "Cannot write to standard output: No space left on device.\n")),
        (PRINTED[2], ">&-", (0, "")),
    ],
    ids=str,
)
def test_whoever_reads_it_may_be_gone(lengths, words, redirected, ends):
    words = [str(lengths) if word == "LENGTHS" else word for word in words]
    ran = shlex.join([sys.executable, "-m", "bridge_cg_plugin.cli.main", *words])
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {ran} {redirected}"], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == ends


def test_a_module_that_prints_at_import(tmp_path):
    """In its own process the descriptor stays closed to others: what is printed while it ends is no answer."""
    recipes = tmp_path / "megatron" / "bridge" / "recipes"
    recipes.mkdir(parents=True)
    (recipes.parent / "__init__.py").write_text("")
    (recipes / "__init__.py").write_text(f"{LOUD}\ndef loud_config():\n    return {{'cuda_graph_impl': 'none'}}\n")
    environment = {name: value for name, value in os.environ.items() if name != plugin.SWITCH}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    command = [sys.executable, "-m", "bridge_cg_plugin.cli.main", "explain", "loud_config", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n") == 1 and isinstance(json.loads(done.stdout), dict)
    for way in ("python", "descriptor", "C", "log", "original object", "end"):
        assert done.stderr.count(f"LOUD {way}\n") == 1, way
