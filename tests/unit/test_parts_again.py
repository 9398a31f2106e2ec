"""Parts of layers that upstream's recompute runs again in the backward: replayed both times, one layer at a time."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from megatron.bridge.peft.lora import LoRA
from megatron.core import tensor_parallel
from torch import distributed

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks.helpers.constructors import checked_options

from ..main_grads import hook_main_grads, reduced
from ..ranks import run_ranks
from . import packs
from .delta_nets import new_delta_nets, stand_ins
from .dispatching import dispatching_on_cpu
from .recomputing import FULL, let_whole_layers_be_recomputed, recomputing_one_by_one, states_of_the_host
from .test_expert_ranks import EP2, options_of, own_packs, rank_model
from .towers import assert_close, loss_of, poison

PACKS = (packs.pack((30, 180, 77)), packs.pack((300,), seed=1), packs.pack((321, 100), seed=2))
ROUTER_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}
PARTS = ["attn", "moe_router"]


def recomputing(**changes):
    return recomputing_one_by_one(packs.new_model(**{**packs.EXPERTS, **changes}))


def trained(model, *batches):
    """Return losses and gradients of microbatches: all forwards, then all backwards from the last one on."""
    model.zero_grad(set_to_none=True)
    losses = [model(**batch) for batch in batches]
    for loss in reversed(losses):
        loss_of([loss]).backward()
    return [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters() if p.requires_grad)]


@contextmanager
def on_graphs(model, modules=PARTS, **options):
    warmup = packs.pack(packs.WARMUP)
    with packs.ON_CPU(), packs.graphs_on(model, warmup, cuda_graph_modules=modules, **options) as graphs:
        yield graphs


def counts(graphs):
    return graphs.statistics().replays, dict(graphs.statistics().fallbacks)


@pytest.mark.parametrize("changes", [{}, ROUTER_LOSS], ids=["pure routers", "a loss of routers"])
@pytest.mark.parametrize("modules", [["attn"], ["moe_router"], PARTS], ids="+".join)
def test_replays_are_eagers_with_microbatches_in_flight(modules, changes):
    model = recomputing(**changes)
    with packs.ON_CPU():
        expected = [trained(model, *batches) for batches in (PACKS[:1], PACKS)]
    with on_graphs(model, modules, num_microbatches=3) as graphs:
        for batches, wanted in zip((PACKS[:1], PACKS), expected, strict=True):
            poison(graphs, float("nan"))
            assert_close(trained(model, *batches), wanted)
        # Two layers of four microbatches, forward and again.
        assert counts(graphs) == (2 * 2 * 4, {})


def rows(seed=0, sequences=2, tokens=96):
    """Return the arguments of Qwen3-VL's language model for padded sequences."""
    ids = torch.randint(packs.VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(seed))
    places = torch.arange(tokens).expand(3, sequences, -1)
    return {"input_ids": ids, "position_ids": places, "attention_mask": None, "labels": ids.roll(-1, 1)}


QWENS = {
    "attention": partial(packs.new_qwen, layers=2),
    "a delta net": partial(new_delta_nets, qwen=True, layers=2, linear_attention_freq=2),
}


@pytest.mark.parametrize("packed", [False, True], ids=["padded rows", "packs"])
@pytest.mark.parametrize("new", QWENS.values(), ids=QWENS)
def test_qwens_layers(new, packed):
    """Those of Qwen3-VL, and of Qwen3.5-VL with gated delta nets."""
    batches = [packs.with_images(each, features=0) for each in PACKS] if packed else [rows(seed) for seed in range(3)]
    options = {"cuda_graph_modules": PARTS, "num_microbatches": 3}
    options |= {} if packed else {"cuda_graph_max_packed_seqs": None}
    with stand_ins():
        model = new(**packs.EXPERTS | ROUTER_LOSS)
        with packs.graphs_on(model, batches[0], capture=False, **options) as graphs:
            recomputing_one_by_one(model)
            with graphs.paused():
                expected = trained(model, *batches)
            assert graphs.capture()
            poison(graphs, float("nan"))
            assert_close(trained(model, *batches), expected)
            assert counts(graphs) == (2 * len(model.decoder.layers) * 3, {})


def test_all_layers_have_one_memory_for_one_microbatch():
    model = recomputing()
    with on_graphs(model, num_microbatches=3) as graphs:
        slots = [slot for region in graphs._regions for slot in region.slots]
        assert len(slots) == len(model.decoder.layers) == 2
        assert len({id(slot.common) for slot in slots}) == 1
        for first, *others in zip(*(slot.buffers.items() for slot in slots), strict=True):
            assert all(buffers["hidden"].data_ptr() == first[1]["hidden"].data_ptr() for _, buffers in others)


def test_gradients_are_added_to_main_grad_once():
    model, expected = recomputing(), recomputing()
    with packs.ON_CPU():
        trained(expected, *PACKS)
    model.nodes = hook_main_grads(model.decoder.parameters())
    with reduced(), on_graphs(model) as graphs:
        trained(model, *PACKS)
        assert not counts(graphs)[1]
    inside = set(model.decoder.parameters())
    for found, right in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close([found.main_grad if found in inside else found.grad], [right.grad])


def test_evaluation_between_a_forward_and_its_backward_leaves_it_alone():
    model = recomputing()

    def run():
        model.zero_grad(set_to_none=True)
        loss = model(**PACKS[0])
        with torch.no_grad():
            between = model.eval()(**PACKS[1])
            model.train()
        loss_of([loss]).backward()
        return [loss.detach(), between, *(p.grad for p in model.parameters())]

    with packs.ON_CPU():
        expected = run()
    with on_graphs(model) as graphs:
        for _ in range(3):
            assert_close(run(), expected)
        assert counts(graphs)[0] > 2 * 2 * 2


def test_layers_whose_backwards_do_not_follow_at_once_run_eager(monkeypatch):
    """Somebody else's function may keep what a second run makes: the memory is another layer's only once it is free."""
    model = recomputing()
    with packs.ON_CPU():
        expected = trained(model, PACKS[0])
    with on_graphs(model, cuda_graph_packed_strict=False) as graphs:
        monkeypatch.setattr(tensor_parallel, "checkpoint", lambda function, _, *args: function(*args))
        assert_close(trained(model, PACKS[0]), expected)
        assert counts(graphs) == (1, {Fallback.NO_FREE_SLOT: 1})


def test_frozen_layers_keep_nothing():
    model = recomputing()
    model.decoder.requires_grad_(False)
    with packs.ON_CPU():
        expected = model(**PACKS[0])
    with on_graphs(model) as graphs:
        assert_close([model(**PACKS[0])], [expected])
        loss_of([model(**PACKS[0])]).backward()
        assert not counts(graphs)[1]


def test_adapters_that_would_drop_others_are_refused():
    model = LoRA(target_modules=["linear_proj"], dim=4, alpha=8, dropout=0.1)(recomputing(), training=True)
    with pytest.raises(CaptureError, match="where adapters would drop others"), on_graphs(model):
        pass


REFUSED = {
    "two at once": (FULL["two layers"], PARTS, packs.EXPERTS),
    "some": (FULL["the first layer"], PARTS, packs.EXPERTS),
    "with an MLP": (FULL["each layer"], ["mlp"], {}),
}


@pytest.mark.parametrize("fields, modules, changes", REFUSED.values(), ids=REFUSED)
def test_layers_must_run_again_one_by_one(fields, modules, changes):
    model = let_whole_layers_be_recomputed(packs.new_model(**changes), **fields)
    vars(model.config).update(packs.DEFAULTS, cuda_graph_modules=modules)
    with pytest.raises(OptionError, match=r"layers one by one \(uniform, 1\)"):
        checked_options(model.config)


@dispatching_on_cpu()
@packs.small_packs()
@states_of_the_host()
def train_on_ranks():
    """Train on ranks that exchange tokens in both runs; the second has a pack that no bucket takes."""
    model, batches = recomputing_one_by_one(rank_model()), own_packs(3)
    if distributed.get_rank():
        batches[1] = packs.pack((10,) * 8)
    expected = trained(model, *batches)
    with packs.graphs_on(model, batches[0], **options_of(model) | {"cuda_graph_modules": PARTS}) as graphs:
        assert_close(trained(model, *batches), expected)
        return list(counts(graphs))


def test_ranks_share_experts(tmp_path):
    assert run_ranks(2, train_on_ranks, tmp_path, **EP2) == [[12, {}], [8, {"too_many_documents": 1}]]
