"""What upstream leaves out of graphs of a vision-language model's language model, and lengths that vary."""

import sys
from types import SimpleNamespace

import pytest
import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import Qwen3VLMultimodalRotaryEmbedding
from megatron.core.transformer import cuda_graphs, transformer_layer

import bridge_cg_plugin
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks import batches
from bridge_cg_plugin.upstream.hooks.batches import TOKENS
from bridge_cg_plugin.upstream.seams.registry.bridge import MODEL, VISION_CONFIG

SEQUENCE, MICRO_BATCH = 32, 2


def layer_config(**fields):
    values = {
        "hidden_size": 16,
        "kv_channels": 8,
        "context_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "multi_latent_attention": False,
        "position_embedding_type": "mrope",
        "cuda_graph_modules": [],
        "cuda_graph_scope": [],
    }
    return SimpleNamespace(**{**values, **fields})


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


def layer_of(config):
    layer = object.__new__(transformer_layer.TransformerLayer)
    torch.nn.Module.__init__(layer)
    layer.config, layer.self_attention = config, torch.nn.Linear(2, 2)
    return layer


def captured(config, microbatches=1):
    """Return the keyword arguments that upstream's helper captures for one layer, per microbatch."""
    layer = layer_of(config)
    chunk = SimpleNamespace(
        decoder=SimpleNamespace(layers=[layer]),
        position_embedding_type=config.position_embedding_type,
        rotary_pos_emb=None,
    )
    helper = object.__new__(cuda_graphs.TECudaGraphHelper)
    helper.config, helper.seq_length, helper.micro_batch_size = config, SEQUENCE, MICRO_BATCH
    helper.num_model_chunks, helper.num_microbatches, helper.num_layers_per_chunk = 1, microbatches, [1]
    helper.chunks_with_decoder, helper.callables_per_chunk, helper.flattened_callables = [chunk], [[layer]], [layer]
    order = [1] * microbatches + [-1] * microbatches
    return helper._get_sample_arguments(order)[1]


def test_graphs_of_a_multimodal_language_model_contain_its_rotary_embedding(active, on_cpu):
    """As the model computes it. Upstream captures them without; once this fails there upstream has mended it."""
    rope = Qwen3VLMultimodalRotaryEmbedding(kv_channels=8, cp_group=SimpleNamespace(size=lambda: 1))
    real = rope(torch.zeros(3, MICRO_BATCH, SEQUENCE, dtype=torch.long), [2, 1, 1])
    (kwargs,) = captured(layer_config())
    found = kwargs["rotary_pos_emb"]
    assert (found.shape, found.dtype) == (real.shape, real.dtype)
    bridge_cg_plugin.deactivate()
    (kwargs,) = captured(layer_config())
    assert "attention_mask" in kwargs and "rotary_pos_emb" not in kwargs


def test_other_layers_are_captured_as_upstream_does(active, on_cpu):
    attention = "cuda_graph_modules" if hasattr(transformer_layer, "CudaGraphModule") else "cuda_graph_scope"
    enum = getattr(transformer_layer, "CudaGraphModule", None) or transformer_layer.CudaGraphScope
    mlp_alone = layer_of(layer_config(**{attention: [enum.mlp]}))
    assert set(mlp_alone.get_layer_static_inputs(SEQUENCE, MICRO_BATCH)) == {"hidden_states"}
    rope = layer_of(layer_config(position_embedding_type="rope"))
    assert "rotary_pos_emb" not in rope.get_layer_static_inputs(SEQUENCE, MICRO_BATCH)


def batch(length):
    return (torch.ones(2, length), torch.ones(2, length), torch.ones(2, length), None, None, {"pixel_values": 1})


@pytest.mark.parametrize(
    "impl, packs, longest, expected",
    [
        ("transformer_engine", None, SEQUENCE, SEQUENCE),
        ("transformer_engine", None, 512, 512),
        ("transformer_engine", 4, SEQUENCE, 20),
        ("none", None, SEQUENCE, 20),
        ("full_iteration", None, SEQUENCE, SEQUENCE),
        ("full_iteration", None, 512, 128),
        ("full_iteration", None, 16, 20),
    ],
)
def test_sequences_are_padded_where_graphs_replay_some_lengths(active, impl, packs, longest, expected):
    padding = batches._at_fixed_length(lambda iterator, cfg, **_: batch(20))
    model = SimpleNamespace(cuda_graph_impl=impl, seq_length=longest, cuda_graph_max_packed_seqs=packs)
    config = SimpleNamespace(model=model)
    tokens, labels, loss_mask, _, _, images = padding(None, config, is_first_pp_stage=True)
    assert tokens.shape == labels.shape == loss_mask.shape == (2, expected)
    if expected > 20:
        assert tokens[:, 20:].eq(0).all() and labels[:, 20:].eq(-100).all() and loss_mask[:, 20:].eq(0).all()
    assert tokens[:, :20].eq(1).all() and images == {"pixel_values": 1}


def test_a_sequence_above_the_length_is_refused(active):
    with pytest.raises(OptionError, match=r"model\.seq_length=16: it must be at least 20"):
        batches.padded(batch(20), (8, 16))


def test_padded_tokens_stay_known_on_the_host(active):
    host, others = torch.arange(40).view(2, 20), batch(20)[1:]
    tokens = host.to("meta")
    TOKENS.remember(tokens, host)
    padded = batches.padded((tokens, *others), (SEQUENCE,))[0]
    assert padded.device.type == "meta"
    assert TOKENS.known(padded).equal(batches.padded((host, *others), (SEQUENCE,))[0])
    unknown = batches.padded((host.to("meta"), *others), (SEQUENCE,))[0]
    assert TOKENS.known(unknown) is None


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
