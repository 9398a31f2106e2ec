"""One option of offloading on the installed release: Bridge's configuration, and Qwen3-VL's language model."""

import sys
from types import SimpleNamespace

import pytest

import bridge_cg_plugin
from bridge_cg_plugin.options import GraphOptionWarning, OptionError, graph_options
from bridge_cg_plugin.options.normalization import _warned
from bridge_cg_plugin.upstream.decoder import offload as language_offload
from bridge_cg_plugin.upstream.hooks.configuration.graph_fields import apply_options, describe_release, read_options
from bridge_cg_plugin.upstream.hooks.configuration.training_config import check_training_config
from bridge_cg_plugin.upstream.seams.registry.language_model import TE_OFFLOAD

PARTS = ["attention", "mlp", "layernorm", "merger", "other"]


@pytest.fixture
def images(active):
    """Return the configuration of the example's Qwen3-VL, vision graphs on."""
    from examples.photographs import training

    return training.training_config(training.Run(impl="transformer_engine"))


@pytest.fixture
def weights_stay(monkeypatch):
    """Let Transformer Engine leave weights on the device."""
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    monkeypatch.setitem(sys.modules, TE_OFFLOAD, SimpleNamespace(NVTE_CPU_OFFLOAD_V1=True))


@pytest.fixture
def text(images, weights_stay):
    """Return the configuration of a dense language model, with weights that stay on the device."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    images.model = GPTModelProvider(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        seq_length=images.model.seq_length,
        vocab_size=128,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        use_te_rng_tracker=True,
    )
    return images


def test_a_vision_region_takes_the_shared_option_over(images, weights_stay):
    _warned.clear()
    images.model.activation_offload = "all"
    with pytest.warns(GraphOptionWarning, match="mlp of the language model stays on the device"):
        check_training_config(images)
    assert images.model.vision_cuda_graph_offload == PARTS
    assert images.model.offload_modules == ["qkv_linear", "core_attn", "attn_proj"]  # of a dense Qwen3-VL
    check_training_config(images)  # what was told once is no contradiction


def test_megatron_core_takes_it_over_for_a_language_model(text):
    text.model.activation_offload = ["attention"]
    check_training_config(text)
    assert text.model.fine_grained_activation_offloading
    assert text.model.offload_modules == ["qkv_linear", "core_attn", "attn_proj"]
    text.model.finalize()
    assert text.model.offload_modules == ["qkv_linear", "core_attn", "attn_proj"]
    check_training_config(text)


def test_packed_graphs_take_it_over(text):
    packed = "cuda_graph_impl=transformer_engine cuda_graph_max_packed_seqs=8"
    apply_options(graph_options(text.model, packed), text)
    text.model.activation_offload = ["mlp"]
    check_training_config(text)
    assert text.model.cuda_graph_packed_offload == ["mlp"]
    assert not text.model.fine_grained_activation_offloading


def test_bridge_validates_what_it_was_told(text):
    from megatron.bridge.training.config import runtime_config_update

    text.model.activation_offload = "attention"
    runtime_config_update(text)
    text.validate()
    assert text.model.fine_grained_activation_offloading


@pytest.mark.parametrize("imported", [False, True])
def test_weights_must_have_been_told_to_stay(text, monkeypatch, imported):
    text.model.activation_offload = "attention"
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1" if imported else "0")
    if imported:
        monkeypatch.setitem(sys.modules, TE_OFFLOAD, SimpleNamespace(NVTE_CPU_OFFLOAD_V1=False))
    else:
        monkeypatch.delitem(sys.modules, TE_OFFLOAD)
    with pytest.raises(OptionError, match="Export NVTE_CPU_OFFLOAD_V1=1"):
        check_training_config(text)
    assert not text.model.fine_grained_activation_offloading


def test_captured_attention_leaves_only_where_the_release_waits_for_it(text):
    model = text.model
    given = "cuda_graph_impl=transformer_engine cuda_graph_modules=attn activation_offload=attention"
    waits = "delay_offload_until_cuda_graph" in describe_release(model).fields
    if waits:
        apply_options(graph_options(model, given), model)
        assert model.offload_modules == ["qkv_linear", "core_attn", "attn_proj"]
        assert read_options(model).offload.parts == ("attention",)
        return
    with pytest.raises(OptionError, match="does not wait for copies inside graphs"):
        graph_options(model, given)


def test_upstreams_own_options_inside_captured_attention_are_refused_where_it_does_not_wait(text):
    model = text.model
    own = "fine_grained_activation_offloading=true offload_modules=core_attn"
    given = f"cuda_graph_impl=transformer_engine cuda_graph_modules=attn {own}"
    if "delay_offload_until_cuda_graph" in describe_release(model).fields:
        assert graph_options(model, given).offload.enabled
        return
    with pytest.raises(OptionError, match="does not wait for copies inside graphs"):
        graph_options(model, given)


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


def test_as_released_it_is_not_told(qwen):
    model, told = qwen
    model.config.fine_grained_activation_offloading = True
    bridge_cg_plugin.deactivate()
    run(model)
    assert not told


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
