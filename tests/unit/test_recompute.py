"""megatron-core's recompute of activations inside graphs: as without it, and the layers run again in the backward."""

from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from megatron.bridge.peft.lora import LoRA
from megatron.core import tensor_parallel

from bridge_cg_plugin.graphs.errors import CaptureError, release_frames
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.upstream.kernels import recompute

from ..ranks import run_ranks
from ..tape import TapeExecutor
from . import packs
from .dispatching import dispatching_on_cpu
from .proof_kinds import Tower, messages, proven, step
from .recomputing import FULL, let_whole_layers_be_recomputed, most_memory
from .test_expert_ranks import EP2, options_of, own_packs, rank_model
from .towers import assert_close, forward, graphs_on, new_tower, results

# What a layer decides by `recompute_modules` when it is made.
SELECTIVE = {
    "core_attn": ["self_attention.checkpoint_core_attention"],
    "mlp": ["recompute_mlp"],
    "layernorm": ["recompute_input_layernorm", "recompute_pre_mlp_layernorm"],
    "moe": ["mlp.moe_layer_recompute"],
    "moe_act": ["mlp.experts.activation_recompute"],
    "shared_experts": ["mlp.shared_experts_recompute"],
}


def let_parts_be_recomputed(module, model):
    for layer in model.decoder.layers:
        for path in SELECTIVE[module]:
            owner, _, name = path.rpartition(".")
            setattr(layer.get_submodule(owner), name, True)


def recomputing_tower(**fields):
    return let_whole_layers_be_recomputed(new_tower(), **fields)


def assert_the_same(tower):
    """Replays are those of graphs that keep everything: as many rows, for which a matrix library takes one kernel."""
    microbatches = [([[1, 4, 4], [1, 4, 6]], seed) for seed in range(2)]
    with graphs_on(plain := new_tower(), buckets=(64,), executor=ReferenceExecutor()):
        expected = [results(plain, *each) for each in microbatches]
    for each, (outputs, gradients) in zip(microbatches, expected, strict=True):
        found = results(tower, *each)
        assert all(map(torch.equal, found[0], outputs))
        torch.testing.assert_close(found[1], gradients)


# A type of mask is a tensor on the host, which tapes read as any other.
WAYS = {
    **{name: (partial(let_whole_layers_be_recomputed, **fields), TapeExecutor) for name, fields in FULL.items()},
    "each layer, replayed whole": (partial(let_whole_layers_be_recomputed, **FULL["each layer"]), ReferenceExecutor),
    "mlp": (partial(let_parts_be_recomputed, "mlp"), TapeExecutor),
    "core_attn": (partial(let_parts_be_recomputed, "core_attn"), ReferenceExecutor),
    "layernorm": (partial(let_parts_be_recomputed, "layernorm"), TapeExecutor),
}
every_way = pytest.mark.parametrize(("let_recompute", "executor"), WAYS.values(), ids=WAYS)


@every_way
def test_layers_of_an_encoder_are_recomputed(let_recompute, executor, again):
    let_recompute(tower := new_tower())
    with graphs_on(tower, buckets=(64,), executor=executor()) as graphs:
        assert_the_same(tower)
        assert next(again) > 0 and graphs.statistics().replays == 2


@every_way
def test_layers_of_packs_are_recomputed(let_recompute, executor, again):
    batches = [packs.pack(packs.WARMUP), *(packs.pack((120, 150), seed=seed) for seed in range(2))]
    with packs.replaying(packs.new_model(), batches, before_capture=let_recompute, executor=executor()):
        assert next(again) > 0


def test_what_is_computed_again_is_gone_before_the_next_layer():
    found, batch = [], packs.pack(packs.WARMUP)
    for layers in (2, 8):
        model = let_whole_layers_be_recomputed(packs.new_model(layers=layers), **FULL["each layer"])
        with packs.graphs_on(model, batch, executor=ReferenceExecutor()) as graphs:
            found.append(most_memory(partial(packs.losses_and_gradients, model, batch)))
            assert packs.replayed(graphs) == 1
    assert found[1] < 1.5 * found[0]  # inputs of layers, and gradients


@pytest.mark.parametrize("fields", FULL.values(), ids=FULL)
def test_layers_that_get_features_of_images_are_recomputed(fields, again):
    batches = [packs.with_images(packs.pack((100, 160))), packs.with_images(packs.pack((300,)), every=3, seed=1)]
    let_recompute = partial(let_whole_layers_be_recomputed, **fields)
    with packs.replaying(packs.new_qwen(), batches, before_capture=let_recompute):
        assert next(again) > 0


COUNTED = {
    "a loss of routers": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2},
    "a bias of experts": {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
}


WITH_EXPERTS = {
    **{name: WAYS[name][0] for name in ("each layer", "two layers", "core_attn", "layernorm")},
    **{name: partial(let_parts_be_recomputed, name) for name in ("moe", "moe_act", "shared_experts")},
}


@pytest.mark.parametrize("let_recompute", WITH_EXPERTS.values(), ids=WITH_EXPERTS)
@pytest.mark.parametrize("changes", COUNTED.values(), ids=COUNTED)
def test_layers_with_experts_are_recomputed_and_count_once(let_recompute, changes, again):
    model = packs.new_model(**{**packs.EXPERTS, "moe_shared_expert_intermediate_size": 16, **changes})
    batches = [packs.pack((30, 180, 77)), packs.pack((300,), seed=1), packs.pack((321, 100), seed=2)]
    options = {"before_capture": let_recompute, "counts": True, "cuda_graph_modules": []}
    with packs.ON_CPU(), packs.replaying(model, batches, **options):
        assert next(again) > 0


@pytest.mark.parametrize("inside", [SELECTIVE["core_attn"], SELECTIVE["layernorm"][:1]], ids=["core", "norm"])
def test_attention_with_experts_outside_recomputes_its_own(inside, again, monkeypatch):
    monkeypatch.setitem(SELECTIVE, "inside", inside)
    model, batches = packs.new_model(**packs.EXPERTS), [packs.pack(packs.WARMUP), packs.pack((120, 150))]
    let_recompute, parts = partial(let_parts_be_recomputed, "inside"), ["attn", "moe_router"]
    with packs.ON_CPU(), packs.replaying(model, batches, before_capture=let_recompute, cuda_graph_modules=parts):
        assert next(again) > 0


@dispatching_on_cpu()
@packs.small_packs()
def replay_on_ranks():
    """Layers whose experts two ranks share exchange tokens again, as eager does, and count once."""
    model = rank_model(**COUNTED["a bias of experts"])
    with packs.replaying(model, own_packs(3), before_capture=WAYS["each layer"][0], counts=True, **options_of(model)):
        pass


def test_experts_of_several_ranks_are_recomputed(tmp_path):
    run_ranks(2, replay_on_ranks, tmp_path, **EP2)


@pytest.mark.usefixtures("first_proofs")
@pytest.mark.parametrize("fields", FULL.values(), ids=FULL)
@pytest.mark.parametrize(
    "frozen", [(), ("patch_embed", "pos_embed", "decoder.layers")], ids=["trained", "frozen layers"]
)
def test_deepstack_features_get_their_gradients(fields, frozen, caplog):
    """Eager, replayed and in proofs as without recompute; upstream's own gives their mergers none."""
    towers = new_tower(), recomputing_tower(**fields), recomputing_tower(**fields)
    for tower in towers:
        for name in frozen:
            tower.get_submodule(name).requires_grad_(False)

    def run(tower, graphs=None):
        return [tensor for tensor in step(Tower, tower, graphs) if tensor is not None]

    expected, _ = run(towers[0]), run(towers[1])
    assert towers[1].decoder.deepstack_merger_list[0].linear_fc1.weight.grad is None
    with graphs_on(towers[2], buckets=(64,), executor=TapeExecutor()) as graphs:
        with graphs.paused():
            assert_close(run(towers[2]), expected)
        for _ in range(3):
            assert_close(run(towers[2], graphs), expected)
        assert not messages(caplog) and all(found is not None for _, found in proven(graphs))


def test_a_frozen_encoder_keeps_nothing_to_recompute():
    tower, plain = recomputing_tower(**FULL["each layer"]).requires_grad_(False), new_tower()
    with graphs_on(tower, buckets=(64,), executor=TapeExecutor()) as graphs:
        assert all(map(torch.equal, forward(tower, [[1, 8, 8]]), forward(plain, [[1, 8, 8]])))
        assert graphs.statistics().replays == 1


def test_a_pass_that_fails_before_an_output_is_discarded_leaves_no_hooks():
    model = packs.new_model()
    with pytest.raises(KeyError), recompute.recomputing([model]):
        tensor_parallel.CheckpointWithoutOutput().checkpoint(torch.exp, torch.ones(2, requires_grad=True))
        raise KeyError
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_layers_that_draw_are_refused():
    tower = recomputing_tower(**FULL["each layer"])
    tower.decoder.config.hidden_dropout = 0.1
    draws = pytest.raises(CaptureError, match="set hidden_dropout to 0")
    with graphs_on(tower, capture=False, executor=TapeExecutor()) as graphs, draws:
        graphs.capture()


@contextmanager
def refused(match):
    """Expect a capture in which a pass fails; the frames of its error hold a checkpoint's hooks on PyTorch's stack."""
    with pytest.raises(CaptureError, match=match) as raised:
        yield
    release_frames(raised.value)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def adapted(dropout):
    """Return a model with adapters, and its microbatches."""
    torch.manual_seed(1)
    adapters = LoRA(target_modules=["linear_proj", "linear_fc2"], dim=4, alpha=8, dropout=dropout)
    model = adapters(packs.new_model(), training=True)
    for name, parameter in model.named_parameters():
        if "linear_out" in name:  # zero at first, which hides what is dropped
            torch.nn.init.normal_(parameter, std=0.1)
    return model, [packs.pack((30, 180, 77)), packs.pack((300,), seed=1), packs.pack((321, 100), seed=2)]


def let_layers_and_their_parts_be_recomputed(model):
    let_parts_be_recomputed("mlp", model)
    let_whole_layers_be_recomputed(model, **FULL["each layer"])


DROPPED = {
    "layers": partial(let_whole_layers_be_recomputed, **FULL["each layer"]),
    "MLPs": partial(let_parts_be_recomputed, "mlp"),
    "MLPs in layers": let_layers_and_their_parts_be_recomputed,
}


@pytest.mark.parametrize("executor", [TapeExecutor, ReferenceExecutor])
@pytest.mark.parametrize("recomputed", DROPPED.values(), ids=DROPPED)
def test_adapters_drop_once_more_what_they_dropped(executor, recomputed, again):
    """Each replay draws anew; its backward drops the same, as without recompute."""
    found = []
    for let_recompute in (lambda model: None, recomputed):
        model, batches = adapted(0.3)
        with packs.graphs_on(model, packs.pack(packs.WARMUP), capture=False, executor=executor()) as graphs:
            let_recompute(model)
            assert graphs.capture()
            torch.manual_seed(2)
            found.append([packs.losses_and_gradients(model, batch) for batch in (*batches, batches[0])])
            assert packs.replayed(graphs) == len(batches) + 1
    assert next(again) > 0
    plain, recomputing = found
    for actual, expected in zip(recomputing, plain, strict=True):
        packs.assert_same(actual, expected)
    assert not torch.equal(plain[0][0], plain[-1][0])


def test_gradients_are_dropped_as_values_are():
    """A factor of 1 / 0.9 rounded to bf16 would make each dropout's gradients 0.16 % too small."""
    x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
    with recompute._Dropouts() as dropouts:
        dropouts.watch(torch.default_generator)
        dropped = torch.nn.functional.dropout(x, 0.1)
        dropouts.begin_again()
        again = torch.nn.functional.dropout(x.detach(), 0.1)
    assert torch.equal(dropped, again) and (dropped == 0).any()
    (gradient,) = torch.autograd.grad(dropped, x, x.detach())
    assert torch.equal(gradient, dropped)


@pytest.mark.parametrize("module, drawn", [(recompute.TE_ATTENTION, "in vain"), ("elsewhere", "something")])
def test_only_attention_of_the_engine_asks_in_vain(module, drawn):
    """Transformer Engine's asks for a random state where its dropout is 0, too."""
    model = packs.new_model()
    attention = model.decoder.layers[0].self_attention.core_attention
    plain = type(attention)

    def forward(attention, *args, **kwargs):
        torch.rand(1)
        return plain.forward(attention, *args, **kwargs)

    attention.__class__ = type("DotProductAttention", (plain,), {"__module__": module, "forward": forward})
    expected = nullcontext() if drawn == "in vain" else refused("which a layer does")
    with packs.graphs_on(model, packs.pack(packs.WARMUP), capture=False, executor=TapeExecutor()) as graphs, expected:
        let_whole_layers_be_recomputed(model, **FULL["each layer"])
        graphs.capture()


def test_somebody_elses_function_stays(monkeypatch):
    calls = []
    monkeypatch.setattr(tensor_parallel, "checkpoint", lambda function, _, *args: (calls.append(1), function(*args))[1])
    with graphs_on(recomputing_tower(**FULL["each layer"]), buckets=(64,), executor=TapeExecutor()):
        assert calls
