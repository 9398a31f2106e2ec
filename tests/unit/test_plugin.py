import importlib.metadata
import os
import subprocess
import sys

import pytest

import bridge_cg_plugin
from bridge_cg_plugin import plugin
from bridge_cg_plugin.switches import ALLOWED
from bridge_cg_plugin.upstream.seams.activation import PATCHING


def python(script, **environment):
    """Run a script in a fresh interpreter; returns what it printed."""
    clean = {k: v for k, v in os.environ.items() if k != plugin.SWITCH}
    done = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-c", script],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_and_activating_imports_neither_torch_nor_megatron():
    python("""
import sys
import bridge_cg_plugin, bridge_cg_plugin.options.explain, bridge_cg_plugin.options.flags
assert bridge_cg_plugin.status() == {"active": False, "patches": {}}, bridge_cg_plugin.status()
for _ in range(2):
    bridge_cg_plugin.activate()
assert bridge_cg_plugin.status()["active"]
for _ in range(2):
    bridge_cg_plugin.deactivate()
assert not bridge_cg_plugin.status()["active"]
for name in ("torch", "megatron", "transformer_engine", "triton"):
    assert name not in sys.modules, name
""")


VALUES = {"0": (False, None), " OFF ": (False, None), "banana": (True, "stays on")}


@pytest.mark.parametrize(("value", "found"), [*((v, (True, None)) for v in ("1", "True", " on ", "")), *VALUES.items()])
def test_the_environment_switches_it(value, found, monkeypatch, caplog):
    done = []
    monkeypatch.setenv(plugin.SWITCH, value)
    for name in ("activate", "observe"):
        monkeypatch.setattr(plugin, name, lambda name=name: done.append(name))
    plugin.autoload()
    on, said = found
    assert done == ["activate" if on else "observe"] and len(caplog.records) == (said is not None)
    assert said is None or (said in caplog.text and repr(value) in caplog.text and ALLOWED in caplog.text)


def test_an_error_in_activation_breaks_nothing(monkeypatch, caplog):
    def fail():
        raise RuntimeError("made to fail")

    monkeypatch.setattr(plugin, "activate", fail)
    plugin.autoload()
    assert "training runs without it" in caplog.text


def test_the_entry_point_exists():
    found = [e for e in importlib.metadata.entry_points(group="torch.backends") if e.name == "bridge_cg_plugin"]
    assert [e.load() for e in found] == [plugin.autoload]


@pytest.mark.parametrize("name", PATCHING)
def test_patches_are_of_the_modules_at_whose_import_they_are_applied(name):
    patches = importlib.import_module(f"bridge_cg_plugin.upstream.{name}").PATCHES
    assert {patch.module for patch in patches} == set(PATCHING[name])


def test_the_version_is_the_installed_one():
    assert importlib.metadata.version("bridge-cg-plugin") == bridge_cg_plugin.__version__
