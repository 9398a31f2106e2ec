"""Providers that do not tell their model which virtual pipeline stage it is."""

import sys

import pytest

from bridge_cg_plugin.upstream.hooks import qwen3_vl
from bridge_cg_plugin.upstream.seams.registry.bridge import MODEL_OF_PROVIDER

ENTRY = qwen3_vl.STAGES[0]


def drops(self, pre_process=None, post_process=None, vp_stage=None):
    return getattr(sys.modules[ENTRY.module], MODEL_OF_PROVIDER)()


def tells(self, pre_process=None, post_process=None, vp_stage=None):
    return getattr(sys.modules[ENTRY.module], MODEL_OF_PROVIDER)(vp_stage=vp_stage)


@pytest.mark.parametrize("provide", [drops, tells])
def test_a_model_gets_its_stage_once_whether_a_release_tells_it_or_not(active, monkeypatch, provide):
    monkeypatch.setattr(sys.modules[ENTRY.module], MODEL_OF_PROVIDER, lambda **arguments: arguments)
    assert qwen3_vl._tells_stage(ENTRY)(provide)(None, vp_stage=1) == {"vp_stage": 1}
