import json
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

import bridge_cg_plugin
from bridge_cg_plugin import plugin
from bridge_cg_plugin.cli import doctor, probe
from bridge_cg_plugin.cli.main import main
from bridge_cg_plugin.switches import PROOF
from bridge_cg_plugin.upstream.environment import OPTIONS, RELEASE_MEMORY
from bridge_cg_plugin.upstream.seams import encoders
from bridge_cg_plugin.upstream.seams.registry import seam
from bridge_cg_plugin.upstream.seams.registry.bridge import TRAIN
from bridge_cg_plugin.upstream.seams.seam import NEWEST
from tests.releases import ROOT

pytestmark = pytest.mark.usefixtures("active", "libraries_that_import")


def diagnose():
    return doctor.diagnose(wants_gpu=False)


def problems():
    return [f"{p.what} -> {p.remedy}" for p in diagnose().problems]


def test_a_good_installation_has_no_problems(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["doctor", "--no-gpu", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err.startswith("doctor looks at ")
    assert found["problems"] == []
    assert found["active"] is True and found["known_release"] is True
    assert found["entry_points"] == ["bridge_cg_plugin.plugin:autoload"]
    assert found["versions"]["megatron-bridge"] is not None
    assert "nvidia-cudnn-frontend" in found["versions"]
    assert found["seams"]["train_step"]["state"] == "active"
    assert found["seams"]["train_step"]["place"] == f"{TRAIN}.train_step"


@pytest.mark.parametrize(
    ("variables", "problem", "remedy"),
    [
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "NCCL_GRAPH_REGISTER",
            "Export NCCL_GRAPH_REGISTER=0",
        ),
        (
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "false"},
            "TORCH_DEVICE_BACKEND_AUTOLOAD=false: PyTorch loads no plugins",
            "",
        ),
        ({plugin.SWITCH: "banana"}, "banana", "set it to 0, false, off"),
        ({PROOF: "banana"}, "banana", "Correct it, or unset it"),
        ({RELEASE_MEMORY: "banana"}, "banana", "Correct it, or unset it"),
        ({OPTIONS: "vision_cuda_graph_imp=none"}, "vision_cuda_graph_imp", "Did you mean vision_cuda_graph_impl?"),
    ],
)
def test_variables_that_cannot_be_read_or_do_not_go_together_are_one_problem(monkeypatch, variables, problem, remedy):
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if "TORCH_DEVICE_BACKEND_AUTOLOAD" in variables:
        bridge_cg_plugin.deactivate()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
        assert diagnose().environment[name] == value and f"{name}={value}" in doctor.render(diagnose())
    (said,) = problems()
    assert problem in said and remedy in said.partition(" -> ")[2]


def test_a_missing_package_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: [])
    assert any("is not installed" in p and "pip install" in p for p in problems())
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "megatron-bridge" else "1")
    assert "megatron-bridge not installed" in problems()[0]


def test_no_gpu_is_a_problem_unless_told_and_the_verdict_comes_first(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    lines = doctor.render(doctor.diagnose()).splitlines()
    assert lines[0] == "1 problem" and "PyTorch sees no NVIDIA GPU" in lines[1] and "--no-gpu" in lines[2]
    assert len(lines) < 20 and "--details" in lines[-1]
    assert diagnose().problems == [] and diagnose().gpu is None


def test_facts_of_a_gpu(monkeypatch, tmp_path):
    properties = SimpleNamespace(name="Made up", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (40 * 2**30, 80 * 2**30))
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\n")
    monkeypatch.setattr(probe, "DRIVER", tmp_path / "version")
    found = doctor.diagnose()
    assert found.problems == []
    assert (found.gpu["name"], found.gpu["count"], found.gpu["capability"]) == ("Made up", 2, "9.0")
    assert (found.gpu["memory_gib"], found.gpu["free_gib"], found.gpu["driver"]) == (80.0, 40.0, "580.95.05")
    assert found.gpu["torch_cuda"]
    assert "Made up" in doctor.render(found)


def test_a_release_that_is_too_old_is_one_problem(monkeypatch, capsys):
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "0.4.2" if name == "megatron-bridge" else version(name))
    assert main(["doctor", "--no-gpu", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    what = "megatron-bridge 0.4.2 is too old for bridge_cg_plugin, so the plugin stays off"
    assert {"what": what, "remedy": "use 0.5 or newer"} in found["problems"] and found["seams"] == {}
    assert main(["doctor", "--no-gpu"]) == 1
    out, err = capsys.readouterr()
    assert what in " ".join(out.split()) and "version table" not in out and not err


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.20.2", "this combination was run: "),
        ("2.18.0", "this combination was audited: "),
        ("9.9", "this combination is unknown: transformer-engine 9.9 was not audited"),
    ],
)
def test_the_combination_is_told_by_what_it_was_checked_with(monkeypatch, version, said):
    fixed = {"megatron-bridge": NEWEST.bridge, "megatron-core": NEWEST.core, "transformer-engine": version}
    versions = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda name: None if name == "transformers" else fixed.get(name, versions(name))
    )
    found = diagnose()
    assert found.combination["state"] in said
    assert said in " ".join(doctor.render(found).split())


def test_a_release_of_megatron_core_that_nobody_tested_is_the_first_line(monkeypatch):
    versions = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "0.20.0" if name == "megatron-core" else versions(name))
    found = diagnose()
    found.problems.clear()
    first = doctor.render(found).splitlines()[0]
    assert first.startswith("not tested with these releases: megatron-bridge ") and "megatron-core 0.20.0" in first


def test_encoders_are_named_those_of_other_packages_too(monkeypatch):
    point = EntryPoint("some.provider.PaintingProvider", "painting:ENCODER", encoders.GROUP)
    assert "of other packages: none" in doctor.render(diagnose())
    monkeypatch.setattr(encoders, "points", lambda: (point,))
    found = diagnose()
    assert found.encoders["others"] == {"PaintingProvider": "painting:ENCODER"}
    assert set(found.encoders["built_in"]) >= {"Qwen3-VL", "Gemma 3", "Nemotron VL", "Qwen3-Omni (audio)"}
    text = " ".join(doctor.render(found).split())
    assert "of other packages: PaintingProvider by painting:ENCODER" in text and "Qwen3-VL, " in text


def test_a_fact_that_a_broken_library_keeps_is_named(monkeypatch):
    def broken(*args):
        raise RuntimeError("no driver")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(name="G", total_memory=1))
    monkeypatch.setattr("torch.cuda.mem_get_info", broken)
    found = diagnose()
    assert found.gpu["name"] == "G" and found.gpu["free_gib"] is None
    assert any("free_gib: RuntimeError: no driver" in p.what for p in found.problems)


def asked(monkeypatch, code, *path, seconds=60):
    """Return what `doctor` finds where the process of its own runs a program, and it alone has PyTorch."""
    monkeypatch.setenv("PYTHONPATH", ":".join(map(str, (*path, ROOT))))
    start = probe.start
    with monkeypatch.context() as patched:
        patched.setattr(doctor.probe, "start", lambda: start(code))
        patched.setattr(doctor, "WAIT", seconds)
        patched.delitem(sys.modules, "torch")
        return [f"{p.what} -> {p.remedy}" for p in doctor.diagnose().problems]


TOLD = (
    "from bridge_cg_plugin.cli import probe; probe.look = lambda: dict(active=True, gpu=None, failed=[]); probe.main()"
)


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (
            "raise OSError('libcudnn.so.9: cannot open shared object file')",
            "OSError: libcudnn.so.9: cannot open shared",
        ),
        ("import os; os.abort()", "it ended the process that imported it, with status -6 -> reinstall what it names"),
    ],
)
def test_a_library_that_does_not_import_is_named(tmp_path, monkeypatch, library, said):
    for name, text in {"triton": "", "transformer_engine": library}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    found = asked(monkeypatch, TOLD, tmp_path)
    assert any(f"transformer_engine.pytorch does not import: {said}" in what for what in found)
    assert any("sees no NVIDIA GPU" in what for what in found)


@pytest.mark.parametrize(("loaded", "is_older"), [((9, 1, 0), True), ((99, 0, 0), False)])
def test_an_older_cudnn_that_transformer_engine_loads_is_a_problem(tmp_path, monkeypatch, loaded, is_older):
    """It loads the system's where there is one, and its NEEDED libraries win over those that PyTorch brings."""
    at = tmp_path
    for name in seam("engine_cudnn_version").module.split("."):
        at = at / name
        at.mkdir()
        (at / "__init__.py").write_text(f"get_cudnn_version = lambda: {loaded}")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    found = [what for what in asked(monkeypatch, TOLD, tmp_path) if "cuDNN" in what]
    said = r"Transformer Engine runs this system's cuDNN 9.1.0, older than PyTorch's [\d.]+ -> "
    right = said + r"export CUDNN_HOME=(/.*) LD_LIBRARY_PATH=\1/lib:\$LD_LIBRARY_PATH"
    assert len(found) == is_older and all(re.fullmatch(right, what) for what in found)


@pytest.mark.parametrize(
    ("code", "seconds", "said"),
    [
        ("raise ImportError('libcudnn.so.9')", 60, "PyTorch does not work: ImportError: libcudnn.so.9 -> install"),
        ("import time; time.sleep(60)", 0.01, "PyTorch does not work: it did not import within 0 s"),
        ("print('noise'); import os; os._exit(3)", 60, "PyTorch does not work: its process ended with status 3"),
    ],
)
def test_that_pytorch_does_not_import_is_one_problem(monkeypatch, code, seconds, said):
    (problem,) = [what for what in asked(monkeypatch, code, seconds=seconds) if "PyTorch" in what]
    assert problem.startswith(said)


class Slow:
    """A process that has looked at PyTorch and still imports libraries."""

    returncode = -9

    def communicate(self, timeout=None):
        if timeout:
            raise subprocess.TimeoutExpired("probe", timeout)
        return probe._MARK + json.dumps({"active": True, "gpu": None, "failed": []}), ""

    def kill(self): ...


def test_libraries_that_take_long_are_no_problem(monkeypatch):
    monkeypatch.setattr(probe, "start", Slow)
    monkeypatch.delitem(sys.modules, "torch")
    (problem,) = doctor.diagnose().problems
    assert "sees no NVIDIA GPU" in problem.what
