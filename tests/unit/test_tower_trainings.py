"""What trains around encoders on a GPU, on a CPU with narrow towers: samples, Bridge's steps and models, graphs."""

import copy
import math
import os
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from megatron.bridge.models.nemotron_omni import nemotron_omni_provider
from megatron.bridge.models.nemotron_vl import nemotron_vl_provider
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.multimodal import llava_model
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.torch_norm import WrappedTorchNorm

import bridge_cg_plugin
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.upstream.hooks import graph_helper, helpers
from examples.photographs.small_tower import start_single_process
from tests.gpu import towers
from tests.gpu.tower_training import RandomItems, graph_fields
from tests.gpu.towers import TOWERS, VOCABULARY
from tests.models.radio_tower import local_spec

from . import bridge_towers, vlm
from .hybrids import stack_spec
from .towers import bridges_step

bridge_cg_plugin.activate()

STEPS, WARM_UP, MICROBATCHES = 2, 1, 1
TOLERANCE = 2e-3  # of the gradients of a parameter
OFF = (
    *("bf16", "use_te_rng_tracker", "qk_layernorm", "layernorm_zero_centered_gamma", "apply_rope_fusion"),
    *("bias_activation_fusion", "masked_softmax_fusion", "bias_dropout_fusion", "persist_layer_norm"),
    *("cross_entropy_loss_fusion", "moe_permute_fusion"),
)
NARROW = 64
LANGUAGE = {"hidden_size": NARROW, "ffn_hidden_size": 2 * NARROW, "num_attention_heads": 1, "num_query_groups": 1}
WITHOUT_EXPERTS = {
    **bridge_towers.WITHOUT_EXPERTS,
    "moe_ffn_hidden_size": None,
    "moe_layer_freq": 1,
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_overlap": False,
}
# Fields of a tower's configuration that say its width, in the words of all towers.
TOWER = {
    **dict.fromkeys(("hidden_size", "out_hidden_size", "d_model", "output_dim", "input_size"), NARROW),
    **dict.fromkeys(("num_heads", "num_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "ffn_hidden_size"), 96),
    **{
        "num_hidden_layers": 1,
        "head_dim": NARROW // 4,
        "kv_channels": NARROW // 4,
        "num_query_groups": 4,
        "downsample_hidden_size": 16,
    },
}
# One image a microbatch. Others train in `tests/seams/test_bridge_towers.py`.
IMAGES = {"nemotron_vl": 1, "nemotron_omni": (28, 28)}


def tower_of(name):
    """Return how a model trains, with one image a microbatch."""
    tower = TOWERS[name]
    return replace(tower, draw=lambda rng: [IMAGES[name]], buckets=tower.buckets[:1])


def change(config, fields):
    """Set those of these fields that a configuration has."""
    for name, value in fields.items():
        if hasattr(config, name):
            setattr(config, name, value)


def without_kernels(config):
    """Let a configuration of megatron-core's ask for what runs on a CPU, in fp32."""
    change(config, dict.fromkeys(OFF, False))
    change(config, dict.fromkeys(("params_dtype", "autocast_dtype", "pipeline_dtype"), torch.float32))
    config.use_cpu_initialization = True


def narrow(provider):
    """Make a model narrow, and without experts, which need Transformer Engine's kernels."""
    without_kernels(provider)
    change(provider, LANGUAGE)
    if provider.num_moe_experts:
        change(provider, WITHOUT_EXPERTS)
    for place in ("vision_config", "vision_projector_config"):
        change(getattr(provider, place, None), TOWER)
    if hasattr(provider, "vision_projector_config"):
        without_kernels(provider.vision_projector_config)


def radio(config, *args, **kwargs):
    """Build Nemotron's tower narrow."""
    change(config, TOWER)
    with mock.patch.object(towers, "LAYERS", 2):
        return towers.radio(config, *args, **kwargs)


def hybrid_layers():
    """Return layers of Nemotron's language model that need no Transformer Engine."""
    spec = stack_spec(None)
    spec.submodules.attention_layer.submodules.self_attention = vlm.language_layers().submodules.self_attention
    return spec


@contextmanager
def everywhere():
    """Let the models be built and run without a GPU."""
    with ExitStack() as stack:
        stack.enter_context(bridge_towers.everywhere())
        stack.enter_context(mock.patch.object(hybrid_block, "TENorm", WrappedTorchNorm))
        stack.enter_context(mock.patch.object(llava_model, "RADIOViTModel", radio))
        for module, packed in ((nemotron_vl_provider, False), (nemotron_omni_provider, True)):
            stack.enter_context(mock.patch.object(module, "hybrid_stack_spec", hybrid_layers()))
            layers = partial(local_spec, packed)
            stack.enter_context(mock.patch.object(module, "get_vit_layer_with_transformer_engine_spec", layers))
        yield


def build(name, **fields):
    """Build a model as its provider does; Nemotron's in bf16, which Bridge's step makes images."""
    start_single_process()
    torch.manual_seed(0)
    provider = TOWERS[name].provider()
    narrow(provider)
    for field, value in fields.items():
        setattr(provider, field, value)
    if hasattr(provider, "transformer_layer_spec"):
        provider.transformer_layer_spec = copy.deepcopy(vlm.language_layers())
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    provider.finalize()
    # megatron-core writes the choice of attention into the environment, and refuses another model's.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    with everywhere(), mock.patch.dict(os.environ, kept, clear=True):
        model = provider.provide(pre_process=True, post_process=True)
    return (model.bfloat16() if "nemotron" in name else model).train()


def loss_of(name, model, sample):
    """Return what Bridge's step and its loss function make of a sample."""
    with everywhere():
        output, loss = TOWERS[name].forward_step(vlm.state(False), iter([RandomItems.collate_fn([sample])]), model)
        total, tokens, _ = loss(output)
    return total / tokens


@pytest.fixture
def without_a_gpu(monkeypatch):
    """Graphs are the reference executor's."""
    monkeypatch.setattr(helpers, "default_executor", lambda **_: ReferenceExecutor())
    yield
    delete_graphs()


def delete_graphs():
    """Take the graphs off all models."""
    for helper in graph_helper.active_helpers():
        helper.delete_cuda_graphs()


def train(name, steps, **fields):
    """Train a model, its graphs driven as Bridge's train loop does.

    Returns:
        Losses, the last step's gradients and the statistics of its encoders.
    """
    model, data = build(name, **fields), RandomItems(tower_of(name), steps * MICROBATCHES, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []

    def microbatches():
        for number in range(step * MICROBATCHES, (step + 1) * MICROBATCHES):
            loss = loss_of(name, model, data[number])
            loss.backward()
            losses.append(loss.item())

    for step in range(steps):
        torch.manual_seed(step)  # Nemotron VL's tower draws crops of its position embeddings
        bridges_step([model], model.config, microbatches)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert [name for name, gradient in gradients.items() if gradient is None] == []
        optimizer.step()
        optimizer.zero_grad()
    found = [helper.graphs.statistics() for helper in graph_helper.active_helpers()]
    delete_graphs()
    return losses, gradients, found


@pytest.mark.parametrize("name", IMAGES)
def test_the_model_trains_on_graphs_as_eager(name, without_a_gpu):
    eager, expected, none = train(name, STEPS)
    fields = {**graph_fields(tower_of(name)), "vision_cuda_graph_buckets": list(tower_of(name).buckets)}
    graphs, gradients, found = train(name, STEPS, cuda_graph_warmup_steps=WARM_UP, **fields)
    assert none == [] and len(found) == TOWERS[name].encoders
    for each in found:
        assert (each.warmup_microbatches, each.fallbacks) == (WARM_UP * MICROBATCHES, {})
        assert each.replays == (STEPS - WARM_UP) * MICROBATCHES
    assert eager[0] == pytest.approx(math.log(VOCABULARY), rel=0.05)
    assert graphs == pytest.approx(eager, rel=1e-4)  # Nemotron's are in bf16
    for parameter, gradient in gradients.items():
        scale = max(expected[parameter].norm().item(), 1e-6)
        assert (gradient - expected[parameter]).norm().item() <= TOLERANCE * scale, parameter
