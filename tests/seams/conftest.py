import importlib
import os
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import bridge_cg_plugin
from bridge_cg_plugin.upstream.seams.registry import SEAMS


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
    return {s.module: importlib.import_module(s.module) for s in SEAMS if s.patched_by and is_importable(s)}


@pytest.fixture
def active(upstream):
    """The plugin is on during the test, and after it whatever the test did."""
    bridge_cg_plugin.activate()
    yield upstream
    bridge_cg_plugin.deactivate()
    bridge_cg_plugin.activate()


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    from bridge_cg_tools.benchmarks.models.qwen_configs import (
        write_configs,  # transformers takes seconds, also where no test runs
    )

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
