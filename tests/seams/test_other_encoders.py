"""Graphs of an encoder that Bridge's train loop does not drive."""

import sys
from types import SimpleNamespace

import pytest
from megatron.core import num_microbatches_calculator as calculator
from torch import nn

from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.upstream.hooks.helpers import constructors as helpers
from bridge_cg_plugin.upstream.hooks.helpers import graph_helper
from bridge_cg_plugin.upstream.seams.registry.bridge import MODEL, VISION_CONFIG

from ..unit.towers import bridges_step, draw, new_tower

GRAPHS = {
    "vision_cuda_graph_impl": "transformer_engine",
    "vision_cuda_graph_buckets": [32, 64],
    "vision_cuda_graph_exact_below": 0,
    "vision_cuda_graph_strict": True,
    "cuda_graph_warmup_steps": 2,
    "pipeline_model_parallel_size": 1,
}


class Chunk(nn.Module):
    """What a train loop holds: a wrapped model with a vision model and the provider as its configuration."""

    def __init__(self, provider):
        super().__init__()
        self.module = nn.Module()
        self.module.vision_model = new_tower()
        self.module.config = provider


@pytest.fixture
def loop(active, monkeypatch):
    monkeypatch.setattr(helpers, "default_executor", lambda **_: ReferenceExecutor())
    yield
    for helper in graph_helper.active_helpers():
        helper.delete_cuda_graphs()


def new_model(**fields):
    return [Chunk(SimpleNamespace(**{**GRAPHS, **fields}))]


def step(model):
    def work():
        outputs = model[0].module.vision_model(*draw([[1, 4, 4]]))
        (outputs[0].sum() + sum(part.sum() for part in outputs[1])).backward()

    bridges_step(model, model[0].module.config, work)


def test_graphs_are_made_after_the_warm_up_steps(loop):
    model, made = new_model(), []
    for _ in range(4):
        step(model)
        (helper,) = graph_helper.active_helpers()
        made.append(helper.graphs.captured)
    assert made == [False, False, True, True]
    assert helper.graphs.statistics().replays == 2 and helper.graphs.statistics().warmup_microbatches == 2
    assert helper.graphs.slots == 1


def test_slots_follow_the_pipeline_and_the_microbatches(loop, monkeypatch):
    monkeypatch.setattr(calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", SimpleNamespace(get=lambda: 3))
    step(new_model(pipeline_model_parallel_size=8))
    assert graph_helper.active_helpers()[0].graphs.slots == 3


@pytest.fixture
def hf_and_provider(active):
    from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider

    from examples.photographs.small_tower import vision_config

    return vision_config(), Qwen3VLModelProvider(num_layers=1, hidden_size=64, num_attention_heads=4)


@pytest.mark.parametrize("scope, names", [([], []), (["attn"], ["attn"])])
def test_the_vision_configuration_says_that_it_is_on_graphs(active, hf_and_provider, scope, names):
    """On every release: by upstream's own code, or by the plugin's."""
    hf, provider = hf_and_provider
    provider.vision_cuda_graph_impl, provider.vision_cuda_graph_scope = "transformer_engine", scope
    provider.max_vision_cuda_graph_seq_length = 256
    config = active[MODEL].get_vision_model_config(hf, megatron_config=provider)
    assert config.cuda_graph_impl == "transformer_engine"
    assert config.max_vision_cuda_graph_seq_length == 256
    found = getattr(config, "cuda_graph_modules", None) or config.cuda_graph_scope or []
    assert [getattr(item, "name", item) for item in found] == names


def test_without_vision_graphs_the_vision_configuration_is_upstreams(active, hf_and_provider):
    hf, provider = hf_and_provider
    config = active[MODEL].get_vision_model_config(hf, megatron_config=provider)
    original = sys.modules[VISION_CONFIG].get_vision_model_config(hf, megatron_config=provider)
    assert config.cuda_graph_impl == original.cuda_graph_impl == "none"
    assert config.cuda_graph_scope == original.cuda_graph_scope
