"""What is known of the saved tensors of upstream's layers, and offloading by megatron-core."""

import importlib

import pytest
import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import ChunkOffloadHandler

from bridge_cg_plugin.offload import never_offload
from bridge_cg_plugin.offload.registry import Registry, registering
from bridge_cg_plugin.options import OptionError, graph_options
from bridge_cg_plugin.upstream.kernels import transformer_engine as activations
from bridge_cg_plugin.upstream.kernels.transformer_engine import known_activations
from tests.unit.towers import draw, new_tower

SOURCE = importlib.import_module(activations.TE_LAYERNORM_LINEAR)


def test_modules_and_functions_are_as_before_afterwards():
    tower = new_tower()
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in tower.modules()]
    before = SOURCE.general_gemm, SOURCE.apply_normalization
    with pytest.raises(KeyError), known_activations([tower]):
        assert SOURCE.general_gemm is not before[0]
        assert SOURCE.apply_normalization is not before[1]
        assert [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in tower.modules()] != hooks
        raise KeyError
    assert (SOURCE.general_gemm, SOURCE.apply_normalization) == before
    assert [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in tower.modules()] == hooks


def test_what_is_saved_belongs_to_a_part_of_the_model():
    tower = new_tower()
    found = {}

    def pack(tensor):
        found[registry.scope] = found.get(registry.scope, 0) + 1
        return tensor.detach()

    pixels, grid = draw([[1, 4, 4]])
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with registering([]) as registry, known_activations([tower]), hooks:
        tower(pixels, grid)
    assert {"attention", "mlp", "layernorm", "merger", "other"} == set(found)
    assert registry.scope == "other"


def noted(registry: Registry, made):
    return registry.record(made).recipe


def test_a_plain_norm_and_product_are_noted_and_others_are_not():
    x, weight, bias = torch.randn(4, 8), torch.randn(8), torch.randn(8)
    matrix = torch.randn(3, 8)
    norm = activations._noting_norm(
        lambda x, out, w, b, *settings: (torch.nn.functional.layer_norm(x, (8,), w, b, settings[0]), None, None)
    )
    product = activations._noting_product(lambda w, x, **kwargs: (x @ w.t(), None, None, None))
    with registering([weight, bias, matrix]) as registry:
        normed = norm(x, None, weight, bias, 1e-6, None)[0]
        recipe = noted(registry, normed)
        assert recipe.kind == "layernorm" and torch.equal(recipe.build(x, weight, bias), normed)
        out = product(matrix, normed, quantization_params=None, bias=None, ub=None)[0]
        recipe = noted(registry, out)
        assert recipe.kind == "linear" and torch.equal(recipe.build(matrix, normed), out)
        assert [not isinstance(held, torch.Tensor) for held, _ in recipe.sources] == [False, True]
        assert noted(registry, product(matrix, normed, quantization_params=object())[0]) is None
        assert noted(registry, product(matrix, normed, ub=object())[0]) is None
        assert noted(registry, norm(x, torch.empty_like(x), weight, bias, 1e-6)[0]) is None
    assert torch.equal(product(matrix, x)[0], x @ matrix.t())


def test_nemotrons_encoder_has_the_settings_of_its_language_model(active):
    from megatron.bridge.models.nemotron_omni.nemotron_omni_provider import NemotronOmniModelProvider

    told = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
    made = NemotronOmniModelProvider(**told, num_attention_heads=4, hidden_size=64, hybrid_layer_pattern="M*")
    assert made._build_vision_config(made).fine_grained_activation_offloading
    made.vision_cuda_graph_impl = "transformer_engine"
    with pytest.raises(OptionError, match="would count layers of the encoder"):
        graph_options(made)


def test_a_marked_tensor_stays_where_megatron_core_offloads(monkeypatch):
    if hasattr(ChunkOffloadHandler, "_can_manage_tensor_for_offload"):  # says no to whatever is not on a GPU
        monkeypatch.setattr(ChunkOffloadHandler, "_can_manage_tensor_for_offload", staticmethod(lambda tensor: True))
    handler = ChunkOffloadHandler.__new__(ChunkOffloadHandler)
    handler.min_offloaded_tensor_size = 1
    plain, marked = torch.ones(4), never_offload(torch.ones(4))
    assert handler.tensor_need_offloading_checker(plain)
    assert not handler.tensor_need_offloading_checker(marked)
