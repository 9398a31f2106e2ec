"""The plugin in processes of every kind: forked, spawned, without site, from a zip file, without Bridge."""

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import bridge_cg_plugin
from bridge_cg_plugin import plugin
from bridge_cg_plugin.switches import ALLOWED
from bridge_cg_plugin.upstream.seams.activation import PATCHING

ROOT = Path(__file__).resolve().parents[2]
SITE = str(importlib.metadata.distribution("wrapt").locate_file(""))
LIMIT_CALLS = 6000

UPSTREAM = """
class ConfigContainer:
    def validate(self):
        return "upstream"
"""
# What every process that has the plugin must show of upstream's module.
CHECKS = """
def check(active=True):
    import sys
    import bridge_cg_plugin
    from megatron.bridge.training.config import ConfigContainer
    assert bridge_cg_plugin.status()["active"] == active, bridge_cg_plugin.status()
    assert hasattr(ConfigContainer.validate, "__wrapped__") == active
    assert ConfigContainer.validate.__qualname__ == "ConfigContainer.validate"
    return sys.modules["megatron.bridge.training.config"].__file__
"""


@pytest.fixture
def upstream(tmp_path):
    """A folder with a Bridge that has nothing but a configuration, and the checks."""
    training = tmp_path / "megatron" / "bridge" / "training"
    training.mkdir(parents=True)
    for folder in (training.parent, training):
        (folder / "__init__.py").write_text("")
    (training / "config.py").write_text(UPSTREAM)
    (tmp_path / "checks.py").write_text(CHECKS)
    return tmp_path


def run(script, *flags, path=(), file=None, **environment):
    """Run a script in a fresh interpreter; returns what it printed."""
    kept = {k: v for k, v in os.environ.items() if k not in (plugin.SWITCH, "PYTHONPATH")}
    source = ["-c", script]
    if file is not None:
        file.write_text(script)
        source = [str(file)]
    done = subprocess.run(
        [sys.executable, *flags, *source],
        cwd="/",
        env={**kept, "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(map(str, path)), **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


LOADER = """
import torch
from torch.utils.data import DataLoader, Dataset
from checks import check

class Items(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        check()
        return index

if __name__ == "__main__":
    if BEFORE:
        check()
    found = [int(i) for i in DataLoader(Items(), num_workers=1, multiprocessing_context=CONTEXT)]
    assert found == [0, 1]
    check()
"""


@pytest.mark.parametrize("context, before", [("fork", True), ("spawn", False)])
def test_dataloader_workers(upstream, context, before):
    script = LOADER.replace("CONTEXT", repr(context))
    script = script.replace("BEFORE", str(before))
    printed = run(script, path=[upstream, ROOT], file=upstream / "job.py")
    assert printed == ""


def test_python_without_site_finds_the_entry_point_on_the_path(upstream):
    run("import torch; from checks import check; check()", "-S", path=[upstream, ROOT, SITE])


def test_the_package_in_a_zip_file(upstream):
    archive = upstream / "plugin.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for file in (ROOT / "bridge_cg_plugin").rglob("*.py"):
            packed.write(file, file.relative_to(ROOT))
    run(
        """
import zipimport, bridge_cg_plugin
assert isinstance(bridge_cg_plugin.__loader__, zipimport.zipimporter)
bridge_cg_plugin.activate()
from checks import check
check()
from bridge_cg_plugin.cli.audit import audit
assert "config_check" in audit([UPSTREAM]).fits
bridge_cg_plugin.deactivate()
check(False)
""".replace("UPSTREAM", repr(str(upstream))),
        path=[upstream, archive, SITE],
    )


def test_a_process_that_never_uses_bridge():
    """Within a process: what loading the plugin adds to `import torch`, counted. The benchmark measures times."""
    script = """
import os, sys
import torch
assert "wrapt" not in sys.modules
before, calls = set(sys.modules), 0
def note(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(note)
from bridge_cg_plugin import plugin
os.environ[plugin.SWITCH] = "1"
plugin.autoload()
sys.setprofile(None)
assert plugin.status()["active"]
print(calls, *{name.partition(".")[0] for name in set(sys.modules) - before})
"""
    calls, *packages = run(script, path=[ROOT], BRIDGE_CG_PLUGIN="0", TORCH_DEVICE_BACKEND_AUTOLOAD="0").split()
    assert int(calls) <= LIMIT_CALLS and set(packages) - sys.stdlib_module_names == {"bridge_cg_plugin", "wrapt"}


def test_importing_and_activating_imports_neither_torch_nor_megatron():
    script = """
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
"""
    run(script, "-W", "error::SyntaxWarning", path=[ROOT])


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


@pytest.mark.parametrize("name", PATCHING)
def test_patches_are_of_the_modules_at_whose_import_they_are_applied(name):
    patches = importlib.import_module(f"bridge_cg_plugin.upstream.{name}").PATCHES
    assert {patch.module for patch in patches} == set(PATCHING[name])


def test_the_version_is_the_installed_one():
    assert importlib.metadata.version("bridge-cg-plugin") == bridge_cg_plugin.__version__
