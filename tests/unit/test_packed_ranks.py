"""Packs of ranks that share layers or documents: equal to eager, on graphs together or not at all."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.decoder import layers
from bridge_cg_plugin.upstream.hooks.helpers.constructors import without_exchanges
from bridge_cg_plugin.upstream.parallel.process_groups import expert_group, without_collectives
from tests.models.language_model import held
from tests.ranks import run_ranks

from .dispatching import dispatching_on_cpu
from .hybrids import hybrid_pack, new_hybrid, stand_ins
from .packs import (
    EXPERTS,
    ON_CPU,
    CausalSegments,
    graphs_on,
    losses_and_gradients,
    new_model,
    new_qwen,
    pack,
    part_of,
    replaying,
    small_packs,
    with_images,
)
from .towers import assert_close

TP2, CP2, EP2 = ({f"{name}_parallel_size": 2} for name in ("tensor_model", "context", "expert_model"))
BUCKETS = {"cuda_graph_packed_buckets": [160, 256, 320]}
PACKS = ((160,), (52, 92, 4), (36, 32, 64, 12, 8), (148, 76))
HYBRID_PACKS = ((160,), (52, 92, 16), (36, 32, 64, 12, 16), (148, 76))
ROOM, HYBRID_ROOM = ((48, 96), (52, 100)), ((48, 96), (52, 108))
A2A = {"cp_comm_type": "a2a"}


def executor_of(model):
    return ReferenceExecutor(isolated=without_exchanges(model.decoder, expert_group(model.decoder)))


def rank_pack(sizes, lengths, make=pack, **kwargs):
    """Return a rank's part of a pack, as Bridge's step gives it; ranks that share experts have tokens of their own."""
    if sizes == EP2:
        kwargs["seed"] = 2 * kwargs.get("seed", 0) + distributed.get_rank()
    arguments = make(lengths, **kwargs)
    ranks = sizes.get("context_parallel_size", 1)
    part = part_of(arguments, ranks, distributed.get_rank()) if ranks > 1 else arguments
    if make is hybrid_pack and ranks > 1:
        params = part["packed_seq_params"]
        params.total_tokens = part["input_ids"].shape[1]
        params.__post_init__()
        assert params.seq_idx.shape == (1, ranks * params.total_tokens)
    return part


@ON_CPU()
@small_packs()
def replay(sizes, room=None, modules=(), packs=PACKS, new=new_model, make=pack, **config):
    model = new(**sizes, **config)
    attention = [m for m in model.decoder.modules() if isinstance(m, CausalSegments)]
    assert all((each._heads is not None) == ("cp_comm_type" in config) for each in attention)
    packs = [(lengths, None) for lengths in packs] if room is None else [room]
    made = [rank_pack(sizes, lengths, make=make, seed=seed, room=room) for seed, (lengths, room) in enumerate(packs)]
    options = {"executor": executor_of(model), "cuda_graph_modules": list(modules), **BUCKETS}
    with replaying(model, made, **options):
        if make is hybrid_pack:
            again = rank_pack(sizes, packs[0][0], make, room=packs[0][1])["packed_seq_params"]
            assert torch.equal(again.seq_idx, made[0]["packed_seq_params"].seq_idx)
        return [losses_and_gradients(model, arguments) for arguments in made]


def images(lengths, seed=0, room=None):
    return with_images(pack(lengths, seed, room), seed=seed)


def qwen(**config):
    """Build Qwen3-VL's language model; on ranks as Bridge's model sets it up: angles are those of their own tokens."""
    model = new_qwen(**config)
    model.rotary_pos_emb.is_thd_format = bool(config)
    return model


@dispatching_on_cpu()
def replay_hybrid(sizes, room=None, modules=(), **config):
    with stand_ins():
        return replay(sizes, room, modules, HYBRID_PACKS, new_hybrid, hybrid_pack, **config)


MIXTURE = {"pattern": "ME*EM", **EXPERTS, "moe_token_dispatcher_type": "alltoall"}
REPLAYED = {
    "TP2, whole": (replay, TP2, None, ()),
    "CP2, attn": (replay, CP2, None, ("attn",)),
    "CP2, whole, heads, gaps": (partial(replay, **A2A), CP2, ROOM, ()),
    "CP2, attn, heads": (partial(replay, **A2A), CP2, None, ("attn",)),
    "hybrid, TP2, whole": (replay_hybrid, TP2, None, ()),
    "hybrid, CP2, attn,mamba": (replay_hybrid, CP2, None, ("attn", "mamba")),
    "hybrid, CP2, gaps": (replay_hybrid, CP2, HYBRID_ROOM, ()),
    "hybrid, CP2, heads": (partial(replay_hybrid, **A2A), CP2, None, ()),
    "hybrid, EP2": (partial(replay_hybrid, **MIXTURE), EP2, None, ()),
}


@pytest.mark.parametrize("work, sizes, room, modules", REPLAYED.values(), ids=REPLAYED)
def test_replays_equal_eager_on_every_rank(tmp_path, work, sizes, room, modules):
    assert len(run_ranks(2, work, tmp_path, sizes, room, modules, **sizes)) == 2


def test_ranks_that_give_tokens_for_heads_in_rings(tmp_path):
    levels = {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2]}
    packs = ((320,), (104, 176, 8), (64, 56, 128, 24, 32), (200, 104))
    work = partial(replay, packs=packs, cp_comm_type="a2a+p2p")
    run_ranks(4, work, tmp_path, levels, **levels)


@pytest.mark.parametrize(
    "work, new, make, packs",
    [
        (replay, new_model, pack, PACKS),
        (replay_hybrid, new_hybrid, hybrid_pack, HYBRID_PACKS),
        (partial(replay, new=qwen, make=images), new_qwen, images, PACKS),
    ],
    ids=["GPT", "hybrid", "images"],
)
def test_two_context_parallel_ranks_equal_one(tmp_path, work, new, make, packs):
    ranks = run_ranks(2, work, tmp_path, CP2, **CP2)
    with stand_ins() if new is new_hybrid else nullcontext():
        whole = new()
        wanted = [p for p in whole.parameters() if p.requires_grad]
        for index, lengths in enumerate(packs):
            losses = whole(**make(lengths, seed=index))
            order = [place for rank in range(2) for place in held(lengths, 2, rank)]
            assert_close([torch.cat([rank[index][0] for rank in ranks], 1)], [losses.detach()[:, order]])
            weights = torch.empty_like(losses)
            for rank in range(2):
                places = held(lengths, 2, rank)
                weights[0, places] = torch.linspace(0.5, 1.5, len(places))
            gradients = torch.autograd.grad((losses * weights).sum(), wanted)
            summed = [sum(parts) for parts in zip(*(rank[index][1][: len(wanted)] for rank in ranks), strict=True)]
            assert_close(summed, list(gradients))


@ON_CPU()
@small_packs()
def fall_back(sizes):
    """Return what a rank counts of packs that no graph takes, among others that one takes."""
    model = new_model(**sizes)
    with graphs_on(model, rank_pack(sizes, (160,)), executor=executor_of(model), **BUCKETS) as graphs:
        for lengths in ((20,) * 8, (200, 124), (160,), (24, 16)):
            losses_and_gradients(model, rank_pack(sizes, lengths))
        return dict(graphs.statistics().fallbacks), graphs.statistics().replays


def test_all_ranks_fall_back_together(tmp_path):
    ranks = run_ranks(2, fall_back, tmp_path, CP2, **CP2)
    counts = {"too_many_documents": 1, "too_many_tokens": 1, "too_few_tokens": 1}
    assert ranks == [(counts, 1)] * 2


def exchange_in_silence():
    """Return what exchanges give inside a silent group, and one that is not inside it."""
    ranks, rank = distributed.group.WORLD, distributed.get_rank()
    own = [distributed.new_group([each]) for each in range(2)][rank]
    mine, (other, part, swapped) = torch.full((2,), 1.0 + rank), torch.full((3, 2), torch.nan)
    whole = torch.full((4,), torch.nan)
    with without_collectives(ranks)():
        operations = [
            distributed.P2POp(distributed.isend, mine, 1 - rank, ranks),
            distributed.P2POp(distributed.irecv, other, 1 - rank, ranks),
        ]
        waited = [request.wait() for request in distributed.batch_isend_irecv(operations)]
        waited.append(distributed.irecv(other, 1 - rank, group=ranks).wait())
        waited.append(distributed.all_gather_into_tensor(whole, mine, group=ranks, async_op=True).wait())
        distributed.all_reduce(mine, group=ranks)
        distributed.reduce_scatter_tensor(part, whole, group=ranks)
        distributed.all_to_all_single(swapped, mine, group=ranks)
        alone = mine.clone()
        distributed.all_gather_into_tensor(alone, mine, group=own)
    restored = [distributed.P2POp(distributed.isend, mine, 1 - rank, ranks).op is distributed.isend]
    return [each.tolist() for each in (mine, other, whole, alone, part, swapped)], waited, restored


def test_exchanges_of_other_groups_go_on_in_silence(tmp_path):
    for rank, (values, waited, restored) in enumerate(run_ranks(2, exchange_in_silence, tmp_path)):
        assert values == [[1.0 + rank] * 2, [0.0] * 2, [1.0 + rank] * 4, [1.0 + rank] * 2, *[[1.0 + rank] * 2] * 2]
        assert waited == [True] * 3 and restored == [True]


@small_packs()
def see_other_packs(sizes):
    model = new_model(**sizes)
    with graphs_on(model, capture=False, cuda_graph_packed_buckets="auto", cuda_graph_packed_strict=False) as graphs:
        model(**rank_pack(sizes, (80,)))
        if distributed.get_rank() == 1:  # as if it had seen another pack: attention would wait for the other rank
            shapes = graphs.workload.shapes
            shapes[0] = shapes[0]._replace(tokens=160)
        graphs.capture()
        return graphs.failure


def test_ranks_that_saw_other_packs_do_not_capture(tmp_path):
    for failure in run_ranks(2, see_other_packs, tmp_path, TP2, **TP2):
        assert "ranks planned different buckets" in failure


def refused_for_the_host(exchange):
    layers.orders_on_device = lambda: False
    model = new_model(context_parallel_size=2, cp_comm_type=exchange)
    try:
        with graphs_on(model, capture=False):
            return None
    except OptionError as error:
        return str(error)


def test_an_older_transformer_engine_is_refused_where_it_reads_offsets(tmp_path):
    assert layers.orders_on_device()
    for exchange in ("a2a", "p2p"):
        (tmp_path / exchange).mkdir()
    for error in run_ranks(2, refused_for_the_host, tmp_path / "a2a", "a2a", **CP2):
        assert "Cannot use model.cp_comm_type='a2a': it must be p2p with cuda_graph_max_packed_seqs" in error
        assert "reads a pack's offsets on the host" in error
    assert run_ranks(2, refused_for_the_host, tmp_path / "p2p", "p2p", **CP2) == [None, None]


@pytest.mark.parametrize("version, ranks, warned", [("2.17.1", 2, True), ("2.17.1", 1, False), ("2.18.0", 2, False)])
def test_a_release_that_takes_padding_for_tokens_is_named(monkeypatch, caplog, version, ranks, warned):
    monkeypatch.setattr(layers.importlib.metadata, "version", lambda name: version)
    layers.check_exchange(SimpleNamespace(context_parallel_size=ranks, cp_comm_type=None))
    assert (f"Transformer Engine {version} computes wrong attention" in caplog.text) == warned
