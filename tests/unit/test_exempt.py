"""Hooks on modules that graphs may leave to a capture."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from torch import nn
from transformers.utils.output_capturing import install_output_capuring_hook

from bridge_cg_plugin.upstream.exempt import DEBUGGER, EXEMPT, own_hook
from bridge_cg_plugin.upstream.hooks.helpers.vision_helper import TextOnlyMicrobatches


def gathers():
    """Return the hook that data parallelism puts on every module to gather parameters."""
    return DistributedDataParallel._make_forward_pre_hook(object.__new__(DistributedDataParallel))


def collects():
    """Return the hook that Hugging Face puts on layers when hidden states are asked for the first time."""
    layer = nn.Linear(1, 1)
    install_output_capuring_hook(layer, "hidden_states", 0)
    return next(iter(layer._forward_hooks.values()))


@pytest.mark.parametrize("hook", [gathers(), partial(gathers()), TextOnlyMicrobatches._before_embedding, collects()])
def test_hooks_of_upstream_and_of_the_plugin_are_their_own(hook):
    assert own_hook(hook)


@pytest.mark.parametrize("hook", [lambda *_: None, partial(lambda *_: None), print, object()])
def test_hooks_of_anybody_else_are_not(hook):
    assert not own_hook(hook)


def engines_module():
    """Return a module as Transformer Engine's are, whose constructor needs a GPU."""
    return type("Linear", (nn.Module,), {"__module__": "transformer_engine.pytorch.module.linear"})()


def test_numbers_that_transformer_engine_gives_modules_are_labels():
    assert EXEMPT.label(type("Ours", (type(engines_module()),), {})(), "name", "Layer_17")


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (engines_module(), "name", "decoder.layers.3"),
        (engines_module(), "name", "Layer_3b"),
        (engines_module(), "name", None),
        (engines_module(), "ub_name", "Layer_3"),
        (nn.Linear(1, 1), "name", "Layer_3"),
    ],
    ids=["given by the model", "other text", "none", "another attribute", "another module"],
)
def test_other_attributes_are_no_labels(module, name, value):
    assert not EXEMPT.label(module, name, value)


@pytest.mark.parametrize("enabled", [True, False])
def test_numbers_of_modules_that_are_debugged_by_name_count(monkeypatch, enabled):
    monkeypatch.setitem(sys.modules, DEBUGGER, SimpleNamespace(TEDebugState=SimpleNamespace(debug_enabled=enabled)))
    assert EXEMPT.label(engines_module(), "name", "Layer_3") is not enabled
