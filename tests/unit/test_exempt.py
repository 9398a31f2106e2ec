"""Hooks on modules that graphs may leave to a capture."""

from functools import partial

import pytest
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from torch import nn
from transformers.utils.output_capturing import install_output_capuring_hook

from bridge_cg_plugin.upstream.hooks.helpers import TextOnlyMicrobatches
from bridge_cg_plugin.upstream.seams.own_code import own_hook


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
