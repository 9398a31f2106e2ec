import json

import pytest

from bridge_cg_plugin import doctor, plugin
from bridge_cg_plugin.cli import main
from bridge_cg_plugin.upstream import train_loop


@pytest.fixture(autouse=True)
def one_gpu(active, monkeypatch):
    """Pretend that there is a GPU, the one thing that CI lacks."""
    monkeypatch.setattr(doctor, "_look_at_gpu", lambda found: None)


def test_a_good_installation_has_no_problems(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert found["active"] is True
    assert found["entry_points"] == ["bridge_cg_plugin.plugin:autoload"]
    assert found["versions"]["megatron-bridge"] is not None
    assert found["patches"]["train_helper"]["state"] == "active"


def test_every_patch_is_known_to_the_doctor():
    known = set(doctor.diagnose().patches)
    assert {p.name for p in train_loop.PATCHES} <= known
    assert all(patch["state"] in ("active", "native") for patch in doctor.diagnose().patches.values())


def test_a_broken_patch_is_a_problem(monkeypatch, capsys):
    patch = train_loop.PATCHES[0]
    monkeypatch.setattr(patch, "state", "broken")
    monkeypatch.setattr(patch, "reason", "it no longer takes model")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert f"patch {patch.name} does not fit megatron-bridge" in out
    assert "it no longer takes model" in out


def test_variables_that_do_not_go_together_are_a_problem(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    found = doctor.diagnose()
    assert found.environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert any("NCCL_GRAPH_REGISTER" in problem for problem in found.problems)


def test_a_missing_package_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "megatron-bridge" else "1")
    assert "megatron-bridge not installed" in doctor.diagnose().problems[0]


def test_a_plugin_that_is_off_is_a_problem(monkeypatch):
    monkeypatch.setattr(plugin, "_on", False)
    assert any("the plugin is off" in problem for problem in doctor.diagnose().problems)
