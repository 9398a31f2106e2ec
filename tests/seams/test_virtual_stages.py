"""Providers that do not tell their model which virtual pipeline stage it is."""

import importlib

import pytest

from bridge_cg_plugin.upstream.hooks import qwen3_vl

MODULE = "megatron.bridge.models.qwen_vl.qwen3_vl_provider"
PROVIDERS = ["Qwen3VLModelProvider", "Qwen3VLMoEModelProvider"]


class Built:
    """Stands in for the model and keeps what it was built with."""

    def __init__(self, **arguments):
        self.arguments = arguments

    def freeze(self, **parts):
        pass


@pytest.fixture
def module(active, monkeypatch):
    found = importlib.import_module(MODULE)
    monkeypatch.setattr(found, "Qwen3VLModel", Built)
    return found


@pytest.fixture(params=PROVIDERS)
def provider(request, module):
    made = getattr(module, request.param)()
    made._pg_collection = None
    return made


def stage_of(built):
    return built.arguments.get("vp_stage")


def test_the_model_is_told_its_virtual_stage(provider, module):
    first, second = (provider.provide(pre_process=not stage, post_process=True, vp_stage=stage) for stage in (0, 1))
    assert (stage_of(first), stage_of(second)) == (0, 1)
    assert first.arguments["pre_process"] and not second.arguments["pre_process"]
    assert stage_of(provider.provide(True, False, 3)) == 3
    assert module.Qwen3VLModel is Built


def test_a_release_that_tells_it_is_left_alone():
    def provide(self, pre_process=None, post_process=None, vp_stage=None):
        return Built(pre_process=pre_process, vp_stage=vp_stage)

    def drops(self, pre_process=None, post_process=None, vp_stage=None):
        return Built(pre_process=pre_process)

    assert not qwen3_vl._drops_stage(provide)
    assert qwen3_vl._drops_stage(drops)


def test_qwen35_tells_it_itself(active):
    found = importlib.import_module("megatron.bridge.models.qwen_vl.qwen35_vl_provider")
    for name in ("Qwen35VLModelProvider", "Qwen35VLMoEModelProvider"):
        assert not qwen3_vl._drops_stage(getattr(found, name).provide)
