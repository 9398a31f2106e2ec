"""The vision configuration of a model whose encoder is on graphs, and of one whose is not."""

import sys

import pytest

from bridge_cg_plugin.upstream.seams.registry.bridge import MODEL, VISION_CONFIG


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
