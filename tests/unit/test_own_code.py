"""Other people's code in a model: on graphs as it is, or eager with the reason; never ignored."""

import copy
import functools
import sys
from functools import partial
from types import MethodType

import pytest
import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model import Qwen3VLVisionModel
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.transformer import attention as core_attention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from modelopt.torch import quantization
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import install_output_capuring_hook

from bridge_cg_plugin.upstream.hooks.helpers.constructors import encoder_options
from bridge_cg_plugin.upstream.seams.contract import SDPA
from bridge_cg_plugin.upstream.seams.own_code import own_hook

from ..tape import TapeExecutor
from . import hugging_face_towers as towers
from . import packs
from .towers import assert_close, forward, graphs_on, new_tower, results

GRID = [[1, 4, 4], [1, 6, 8]]


def doubled(function):
    """Wrap a function as decorators do, its name and all."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        made = function(*args, **kwargs)
        return (made[0] * 2, *made[1:]) if isinstance(made, tuple) else made * 2

    return wrapper


def wrap(owner, name="forward"):
    setattr(owner, name, doubled(getattr(owner, name)))


def subclassed(module, **methods):
    module.__class__ = type("Mine", (type(module),), methods)


def triple(self, grid):
    return super(type(self), self).fast_pos_embed_interpolate(grid) * 3


class Around(nn.Module):
    """Another class in a module's place, with the same attributes."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name) if name in ("inv_freq", "config") else super().__getattr__(name)

    def forward(self, *args, **kwargs):
        return doubled(self.inner)(*args, **kwargs)


OUTLINES = {
    "forward on the instance": lambda t: wrap(t),
    "forward as a method": lambda t: setattr(t, "forward", MethodType(doubled(Qwen3VLVisionModel.forward), t)),
    "method on the instance": lambda t: wrap(t, "rot_pos_emb"),
    "a subclass": lambda t: subclassed(t, fast_pos_embed_interpolate=triple),
    "rotary frequencies": lambda t: wrap(t.rotary_pos_emb),
    "another rotary embedding": lambda t: setattr(t, "rotary_pos_emb", Around(t.rotary_pos_emb)),
}


@pytest.mark.parametrize("change", OUTLINES.values(), ids=OUTLINES)
def test_an_encoder_whose_outline_is_changed_runs_eager(change):
    tower = new_tower()
    change(tower)
    expected, before = forward(tower, GRID), dict(vars(tower))
    with graphs_on(tower, capture=False, strict=False, executor=TapeExecutor()) as graphs:
        assert not graphs.capture() and "test_own_code.py:" in graphs.failure
        assert_close(forward(tower, GRID), expected, 0)
        assert graphs.statistics().fallbacks == {"own_code": 1}
    assert vars(tower).get("forward") is before.get("forward")


@pytest.mark.parametrize(
    ("kind", "name"), [(nn.Conv3d, "forward"), (nn.Conv3d, "_conv_forward"), (nn.Embedding, "forward")]
)
def test_a_class_of_pytorchs_that_is_patched_after_the_capture_is_seen(monkeypatch, kind, name):
    tower = new_tower()
    with graphs_on(tower, executor=TapeExecutor()) as graphs:
        forward(tower, GRID)
        monkeypatch.setattr(kind, name, doubled(getattr(kind, name)))
        found = forward(tower, GRID)
        assert (graphs.statistics().replays, graphs.statistics().fallbacks) == (1, {"model_changed": 1})
        with graphs.paused():
            assert_close(found, forward(tower, GRID), 0)


class Scaled(nn.Embedding):
    def forward(self, rows):
        return super().forward(rows) * 3


def lora(*targets):
    settings = LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False)
    return lambda tower: inject_adapter_in_model(settings, tower)


CAPTURED = {
    "a subclass with the same outline": lambda t: subclassed(t, set_input_tensor=lambda *_: None, extra=lambda _: 1),
    "position embedding": lambda t: setattr(t.pos_embed, "__class__", Scaled),
    "position embedding's adapter": lora("pos_embed"),
    "patch convolution's adapter": lora("proj"),
    "patch convolution": lambda t: wrap(t.patch_embed.proj),
    "MLP": lambda t: wrap(t.decoder.layers[0].mlp),
    "attention": lambda t: wrap(t.decoder.layers[0].self_attention),
    "projection": lambda t: wrap(t.decoder.layers[0].self_attention, "get_query_key_value_tensors"),
    "merger": lambda t: wrap(t.merger),
    "layers": lambda t: wrap(t.decoder),
}


@pytest.mark.parametrize("change", CAPTURED.values(), ids=CAPTURED)
def test_own_code_that_leaves_the_outline_is_captured(change):
    tower = new_tower()
    change(tower)
    assert_on_graphs(tower, kernels="fast")


def assert_on_graphs(tower, run=results, **options):
    """Compare outputs and gradients of an encoder on graphs with eager's."""
    for parameter in tower.parameters():
        parameter.requires_grad_(True)
    expected = run(tower, GRID)
    with graphs_on(tower, buckets=(64,), executor=TapeExecutor(), **options) as graphs:
        actual = run(tower, GRID)
        assert graphs.statistics().replays == 1 and not graphs.statistics().fallbacks
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])


ADAPTED = {
    "Qwen2.5-VL": (towers.new_qwen25, towers.run_qwen25),
    "GLM-4.5V": (towers.new_glm45v, towers.run_qwen25),
    "Qwen3-Omni": (towers.new_qwen3_omni, towers.run_qwen3_omni),
}


@pytest.mark.parametrize(("build", "run"), ADAPTED.values(), ids=ADAPTED)
def test_adapters_of_all_linears_embeddings_and_convolutions_are_captured(build, run):
    tower = build()
    kinds = (nn.Linear, nn.Embedding, nn.Conv2d, nn.Conv3d)
    names = {name for name, module in tower.named_modules() if isinstance(module, kinds)}
    names -= {"embeddings.position_embedding"}  # GLM-4.5V takes its weight alone, in eager as well
    lora(*names)(tower)
    assert_on_graphs(tower, partial(towers.results, run))


def quantized(model, batch, kind="FP8_DEFAULT_CFG"):
    """Let ModelOpt quantize a model, whose outputs change by it."""
    before = batch(model)
    quantization.quantize(model, copy.deepcopy(getattr(quantization, kind)), batch)
    assert not torch.equal(batch(model), before)
    return model


@pytest.mark.parametrize(
    ("kind", "replays", "fallbacks"),
    [("FP8_DEFAULT_CFG", 1, {}), ("INT8_DEFAULT_CFG", 0, {"capture_failed": 1})],  # a CPU's int8 reads scales
)
def test_an_encoder_that_modelopt_quantized_is_on_graphs_or_eager_with_the_reason(kind, replays, fallbacks):
    tower = quantized(new_tower(), lambda tower: forward(tower, GRID)[0], kind)
    expected = results(tower, GRID)
    with graphs_on(tower, capture=False, strict=False, buckets=(64,), executor=TapeExecutor()) as graphs:
        assert graphs.capture() == bool(replays)
        actual = results(tower, GRID)
        assert (graphs.statistics().replays, graphs.statistics().fallbacks) == (replays, fallbacks)
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])


@pytest.mark.parametrize(("kind", "replays"), [("FP8_DEFAULT_CFG", 1), ("INT8_DEFAULT_CFG", 0)])
def test_packed_layers_that_modelopt_quantized_are_on_graphs_or_eager(kind, replays):
    """ModelOpt swaps a function of upstream's in each call, and back only where nothing is raised in it."""
    with packs.ON_CPU():
        batch = packs.pack((200, 120))
        decoder = quantized(packs.new_model(), lambda decoder: decoder(**batch), kind)
        expected = packs.losses_and_gradients(decoder, batch)
        options = {"executor": TapeExecutor(), "capture": False, "cuda_graph_packed_strict": False}
        with packs.graphs_on(decoder, packs.pack((100, 150)), **options) as graphs:
            assert graphs.capture() == bool(replays)
            packs.assert_same(packs.losses_and_gradients(decoder, batch), expected)
            assert packs.replayed(graphs) == replays


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Qwen3VLVisionModel, "rot_pos_emb"),
        (sys.modules[Qwen3VLVisionModel.__module__], "_vision_forward_packed_attention_setup"),
    ],
    ids=["method", "function"],
)
def test_a_patch_after_the_capture_is_noticed_and_graphs_return_without_it(owner, name, monkeypatch):
    if not hasattr(owner, name):
        pytest.skip("this release has none")
    tower = new_tower()
    with (
        graphs_on(tower, buckets=(64,), executor=TapeExecutor(), strict=False) as graphs,
        monkeypatch.context() as patched,
    ):
        kept = getattr(owner, name)
        patched.setattr(owner, name, lambda *args, **kwargs: kept(*args, **kwargs))
        for _ in range(3):
            forward(tower, GRID)
        assert graphs.statistics().fallbacks == {"model_changed": 1, "own_code": 2}
        patched.undo()
        forward(tower, GRID)
        assert graphs.statistics().replays == 1


def sharp(module, query, key, value, mask=None, **kwargs):
    mask = kwargs.pop("attention_mask", mask)
    return sdpa_attention_forward(module, query, key, value, mask, **{**kwargs, "scaling": 4.0})


@pytest.mark.parametrize("registered", ["under its own name", "in the place of PyTorch's", "in PyTorch"])
def test_an_attention_function_that_somebody_registered_runs(registered, monkeypatch):
    tower, batch = towers.new_qwen25(), towers.draw_windows([[1, 8, 8]])
    if registered == "under its own name":
        AttentionInterface.register("sharp", sharp)
        tower.set_attn_implementation("sharp")
    elif registered == "in PyTorch":
        monkeypatch.setattr(functional, SDPA, doubled(getattr(functional, SDPA)))
    else:
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", sharp)
    expected = tower(batch[0], grid_thw=batch[1]).pooler_output
    with graphs_on(tower, capture=False, strict=False) as graphs:
        assert not graphs.capture() and "attention" in graphs.failure
        assert_close([tower(batch[0], grid_thw=batch[1]).pooler_output], [expected], 0)


class Delegating:
    """Stands in for a token dispatcher."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def combine_postprocess(self, hidden):
        return self._inner.combine_postprocess(hidden) * 2


def patch(owner, name):
    """Return what lets a function that models share be somebody else's."""
    missing = pytest.mark.skipif(not hasattr(owner, name), reason="this release has none")
    return pytest.param(lambda _, patched: patched.setattr(owner, name, doubled(getattr(owner, name))), marks=missing)


PACKED = {
    "rotation": patch(core_attention, "apply_rotary_pos_emb"),
    "experts": patch(MoELayer, "forward"),
    "an exchange of all": patch(MoELayer, "combine"),
    "a linear layer": lambda moe, _: wrap(moe.experts.local_experts[0].linear_fc1),
    "what it multiplies by": lambda moe, _: wrap(moe.experts.local_experts[1].linear_fc2, "_forward_impl"),
    "its weights": lambda moe, _: setattr(moe.experts.local_experts[0].linear_fc1, "_get_weight_tensors", Annotated),
    "all of it": lambda moe, _: wrap(moe),
    "a router": lambda moe, _: wrap(moe.router, "routing"),
    "an exchange": lambda moe, _: setattr(moe, "token_dispatcher", Delegating(moe.token_dispatcher)),
}


@pytest.mark.parametrize("change", PACKED.values(), ids=PACKED)
def test_packed_layers_with_own_code_run_eager_as_any_region(change, monkeypatch):
    with packs.ON_CPU():
        decoder, arguments = packs.new_model(**packs.EXPERTS), packs.pack((200, 120))
        change(next(layer.mlp for layer in decoder.decoder.layers if layer.is_moe_layer), monkeypatch)
        expected = packs.losses_and_gradients(decoder, arguments)
        options = {"cuda_graph_modules": [], "cuda_graph_packed_strict": False, "capture": False}
        with packs.graphs_on(decoder, packs.pack((100, 150)), **options) as graphs:
            assert not graphs.capture() and "test_own_code." in graphs.failure
            found = packs.losses_and_gradients(decoder, arguments)
            assert_close([found[0], *found[1]], [expected[0], *expected[1]], 0)
            assert graphs.statistics().fallbacks == {"own_code": 1}


class Annotated(nn.Module):
    """Runs a module inside a range of a profiler."""

    def __init__(self, module):
        super().__init__()
        self.module, self.config = module, module.config

    def forward(self, *args, **kwargs):
        with torch.profiler.record_function("encoder"):
            return self.module(*args, **kwargs)


def in_bf16(tower):
    config = copy.copy(tower.config)
    config.bf16 = True
    return Float16Module(config, tower)


@pytest.mark.parametrize("wrapped", [in_bf16, Annotated])
def test_what_is_around_a_region_leaves_it_on_graphs(wrapped):
    assert_on_graphs(wrapped(new_tower()))


@pytest.mark.parametrize("part", ["", "decoder.layers.0"])
def test_a_compiled_module_is_on_graphs(part, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    tower, traced = new_tower(layers=1, deepstack=False), []
    tower.get_submodule(part).compile(backend=lambda graph, _: traced.append(graph) or graph.forward)
    assert_on_graphs(tower)
    assert traced


def gathers():
    """Return the hook that data parallelism puts on every module to gather parameters."""
    return DistributedDataParallel._make_forward_pre_hook(object.__new__(DistributedDataParallel))


def collects():
    """Return the hook that Hugging Face puts on layers when hidden states are asked for the first time."""
    layer = nn.Linear(1, 1)
    install_output_capuring_hook(layer, "hidden_states", 0)
    return next(iter(layer._forward_hooks.values()))


def test_hooks_of_upstream_and_of_the_plugin_are_told_from_anybody_elses():
    assert all(map(own_hook, (gathers(), partial(gathers()), encoder_options, collects())))
    assert not any(map(own_hook, (lambda *_: None, partial(lambda *_: None), print, object())))


class Counting(nn.Conv2d):
    """Counts its passes in a buffer."""

    def forward(self, pixels):
        self.passes.add_(1)
        return super().forward(pixels)


def test_a_convolution_of_pixtrals_runs_once_in_a_replay():
    tower = towers.new_pixtral()
    tower.patch_conv.register_buffer("passes", torch.zeros(()))
    tower.patch_conv.__class__ = Counting
    expected = towers.run_pixtral(tower, [[1, 8, 8], [1, 4, 8]])
    with graphs_on(tower, buckets=(128,), executor=TapeExecutor()) as graphs:
        tower.patch_conv.passes.zero_()
        for number in (1, 2):
            assert_close(towers.run_pixtral(tower, [[1, 8, 8], [1, 4, 8]]), expected)
            assert tower.patch_conv.passes == graphs.statistics().replays == number
