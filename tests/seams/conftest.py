import importlib
import os
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import bridge_cg_plugin
from bridge_cg_plugin.cli import probe
from bridge_cg_plugin.upstream.hooks.recipes import PATCHES
from bridge_cg_plugin.upstream.seams import activation, states
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.registry import SEAMS
from bridge_cg_plugin.upstream.seams.source_reader import SourceReader

from .loops import in_one_process

START = probe.start
SFT = "qwen3_vl_8b_sft_config"
with_presets = pytest.mark.skipif(
    not PATCHES[0].seam.expected_in(bridge_release()),
    reason="the presets derive from recipes of a later megatron-bridge",
)


def is_importable(seam):
    """Whether the installed release's wheels have the seam's module."""
    try:
        return seam.packaged and find_spec(seam.module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="session")
def upstream():
    """Every patched module of upstream's wheels, imported, by name."""
    bridge_cg_plugin.activate()
    return {s.module: importlib.import_module(s.module) for s in SEAMS if s.touch == "patched" and is_importable(s)}


@pytest.fixture
def active(upstream):
    """The plugin is on during the test, and after it whatever the test did."""
    bridge_cg_plugin.activate()
    before = in_effect()
    yield upstream
    for drop in activation._before_deactivation:
        drop()
    if in_effect() != before:
        bridge_cg_plugin.deactivate()
        bridge_cg_plugin.activate()


@pytest.fixture
def graphs_wanted(monkeypatch):
    """Batches of Qwen3-VL's are prepared as for a model on graphs."""
    from .qwen_batches import graphs_are

    graphs_are(True, monkeypatch)


@pytest.fixture
def on_a_device(monkeypatch):
    """What prepares batches takes the CPU's tensors for a device's."""
    from .qwen_batches import take_all_for_the_devices

    take_all_for_the_devices(monkeypatch)


@pytest.fixture
def modelling(active):
    """The module of upstream's Qwen3-VL between encoder and language model."""
    from bridge_cg_plugin.upstream.hooks import between

    return active[between.PATCHES[0].seam.module]


@pytest.fixture(scope="session")
def reader():
    """Upstream's sources, each parsed once."""
    return SourceReader()


@pytest.fixture
def break_seam(monkeypatch, reader):
    """Return a function that lets one seam expect what is not there, and compares it as ever."""
    release = bridge_release()
    real = states.installed_state

    def break_one(broken):
        other = "function" if broken.kind == "class" else "class"
        wrong = replace(broken, kind=other, target=broken.target or "Absent")
        found = states.compare(wrong, reader, release)
        monkeypatch.setattr(
            states, "installed_state", lambda name, release: found if name == broken.name else real(name, release)
        )

    return break_one


@pytest.fixture
def libraries_that_import(monkeypatch):
    """`bridge-cg doctor` asks a process that imports nothing, which would take seconds, and finds no fault."""
    found = f"""print({probe._MARK!r} + '{{"libraries": {{}}}}')"""
    monkeypatch.setattr(probe, "start", lambda code=found: START(code))


def in_effect():
    """What a test may change of the plugin: its switch, what is known of every patch, and each that was made.

    Undoing all patches and making them again takes fifty times as long as this, and most tests leave them alone.
    """
    made = [(patch, [id(each) for each in getattr(patch, "_installed", ())]) for patch in activation.loaded_patches()]
    return bridge_cg_plugin.status(), made


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    from tests.models.qwen_configs import write_configs  # transformers takes seconds, also where no test runs

    return write_configs(tmp_path_factory.mktemp("hugging_face"))


@pytest.fixture
def bridge(active, folders, monkeypatch, tmp_path):
    """Bridge's recipe package, with model configurations read from local folders and a GPU to ask for its kind."""
    from megatron.bridge import AutoBridge

    monkeypatch.chdir(tmp_path)
    read = AutoBridge.from_hf_pretrained.__func__
    local = classmethod(lambda cls, path, **kwargs: read(cls, str(folders[path]), **kwargs))
    monkeypatch.setattr(AutoBridge, "from_hf_pretrained", local)
    gpu = SimpleNamespace(major=9, minor=0, name="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: gpu)
    with mock.patch.dict(os.environ):
        yield importlib.import_module("megatron.bridge.recipes")


@pytest.fixture
def loop(active, monkeypatch):
    """Let schedules run without a process group; see `in_one_process`."""
    yield from in_one_process(monkeypatch)


@pytest.fixture
def sft(bridge):
    """The recipe that most tests take, by its name."""
    return SFT if hasattr(bridge, SFT) else pytest.skip("the recipe comes with a later megatron-bridge")
