"""Offloading by megatron-core: what it is told in Qwen3-VL's language model, and what the plugin refuses."""

import pytest

from bridge_cg_plugin.options import OptionError, graph_options
from bridge_cg_plugin.upstream.decoder import core_offload as language_offload


def test_nemotrons_encoder_has_the_settings_of_its_language_model(active):
    from megatron.bridge.models.nemotron_omni.nemotron_omni_provider import NemotronOmniModelProvider

    told = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    made = NemotronOmniModelProvider(**told, num_attention_heads=4, hidden_size=64, hybrid_layer_pattern="M*")
    assert made._build_vision_config(made).fine_grained_activation_offloading
    with pytest.raises(OptionError, match="would count layers of the encoder"):
        graph_options(made)


@pytest.fixture
def qwen(active):
    """Return Qwen3-VL's language model on the CPU and a list of the microbatches that offloading was told of."""
    from tests.unit.packs import new_qwen

    model, told = new_qwen(layers=1), []
    model.preprocess_for_fine_grained_offloading = lambda: told.append(model)
    return model, told


def run(model):
    from tests.unit.packs import pack, with_images

    arguments = with_images(pack((10, 6)), features=0)
    model(**arguments)


@pytest.mark.parametrize("on", [False, True])
def test_offloading_is_told_of_every_microbatch_of_qwen3_vl(qwen, on):
    model, told = qwen
    model.config.fine_grained_activation_offloading = on
    for _ in range(2):
        run(model)
    assert told == [model] * (2 if on else 0)


def test_a_release_that_tells_is_left_alone():
    def tells(self):
        self.preprocess_for_fine_grained_offloading()

    assert not language_offload._tells_nothing(tells)
    assert language_offload._tells_nothing(run)


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
