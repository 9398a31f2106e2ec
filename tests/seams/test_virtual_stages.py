"""Providers that do not tell their model which virtual pipeline stage it is."""

import importlib

from bridge_cg_plugin.upstream.hooks import qwen3_vl


class Built:
    """Stands in for the model and keeps what it was built with."""

    def __init__(self, **arguments):
        self.arguments = arguments

    def freeze(self, **parts):
        pass


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
