"""Qwen3-VL's model as verl's engine builds it: lengths vary, and packed graphs are asked for."""

from types import SimpleNamespace

import pytest

import bridge_cg_plugin

MODULE = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model"
PACKED = {"cuda_graph_modules": [], "cuda_graph_max_packed_seqs": 4, "use_te_rng_tracker": True}


@pytest.fixture
def expose(active):
    model = pytest.importorskip(MODULE).Qwen3VLModel
    if not hasattr(model, "_expose_language_model_for_cuda_graph_helper"):
        pytest.skip("this release's model does not look at lengths")
    return lambda made: model._expose_language_model_for_cuda_graph_helper(made)


def made_with(**fields):
    config = SimpleNamespace(cuda_graph_impl="transformer_engine", variable_seq_lengths=True, **fields)
    parts = {name: object() for name in ("position_embedding_type", "rotary_pos_emb", "decoder")}
    return SimpleNamespace(language_model=SimpleNamespace(config=config, **parts))


def test_packed_graphs_take_lengths_that_vary(expose):
    model = made_with(**PACKED)
    expose(model)
    assert model.decoder is model.language_model.decoder
    assert model.language_model.config.variable_seq_lengths


def test_packed_options_count_for_graphs_of_packs_alone(expose):
    model = made_with(**PACKED)
    model.language_model.config.cuda_graph_impl = "full_iteration"
    with pytest.raises(AssertionError, match="fixed sequence lengths"):
        expose(model)
    model.language_model.config.cuda_graph_impl = "none"
    model.language_model.config.cuda_graph_packed_buckets = [0]
    expose(model)
    assert "decoder" not in vars(model)


def test_graphs_of_one_length_are_refused_as_upstream_does(expose):
    with pytest.raises(AssertionError, match="fixed sequence lengths"):
        expose(made_with())


def test_without_the_plugin_upstream_refuses_both(expose):
    bridge_cg_plugin.deactivate()
    with pytest.raises(AssertionError, match="fixed sequence lengths"):
        expose(made_with(**PACKED))
