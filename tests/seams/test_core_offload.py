"""Offloading by megatron-core: what the plugin refuses, and marks that it heeds."""

import pytest

from bridge_cg_plugin.options import OptionError, graph_options


def test_nemotrons_encoder_has_the_settings_of_its_language_model(active):
    from megatron.bridge.models.nemotron_omni.nemotron_omni_provider import NemotronOmniModelProvider

    told = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    made = NemotronOmniModelProvider(**told, num_attention_heads=4, hidden_size=64, hybrid_layer_pattern="M*")
    assert made._build_vision_config(made).fine_grained_activation_offloading
    with pytest.raises(OptionError, match="would count layers of the encoder"):
        graph_options(made)


def test_a_marked_tensor_stays_where_megatron_core_offloads(monkeypatch):
    import torch
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler

    from bridge_cg_plugin.offload import never_offload

    if hasattr(ChunkOffloadHandler, "_can_manage_tensor_for_offload"):  # says no to whatever is not on a GPU
        monkeypatch.setattr(ChunkOffloadHandler, "_can_manage_tensor_for_offload", staticmethod(lambda tensor: True))
    handler = ChunkOffloadHandler.__new__(ChunkOffloadHandler)
    handler.min_offloaded_tensor_size = 1
    plain, marked = torch.ones(4), never_offload(torch.ones(4))
    assert handler.tensor_need_offloading_checker(plain)
    assert not handler.tensor_need_offloading_checker(marked)
