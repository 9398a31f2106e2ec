"""Packed-sequence graphs of hybrids whose ranks share layers or documents: equal to eager on every rank."""

from functools import partial

import pytest
import torch
from torch import distributed

from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.upstream.hooks.helpers import without_exchanges
from bridge_cg_plugin.upstream.parallel.process_groups import expert_group
from tests.models.language_model import held
from tests.ranks import run_ranks

from .dispatching import dispatching_on_cpu
from .hybrids import hybrid_pack, new_hybrid, stand_ins
from .packs import EXPERTS, graphs_on, losses_and_gradients, part_of, small_packs
from .towers import assert_close

TP2, CP2, EP2 = ({f"{name}_parallel_size": 2} for name in ("tensor_model", "context", "expert_model"))
PACKS = ((160,), (52, 92, 16), (36, 32, 64, 12, 16), (148, 76))
ROOM = ((48, 96), (52, 108))
BUCKETS = {"cuda_graph_packed_buckets": [160, 256]}


def rank_pack(sizes, *args, **kwargs):
    """Return a rank's part of a pack, as Bridge's step gives it: total_tokens are those of the rank.

    Ranks that share experts have tokens of their own.
    """
    if sizes == EP2:
        kwargs["seed"] = 2 * kwargs.get("seed", 0) + distributed.get_rank()
    arguments = hybrid_pack(*args, **kwargs)
    if sizes != CP2:
        return arguments
    part = part_of(arguments, 2, distributed.get_rank())
    params = part["packed_seq_params"]
    params.total_tokens = part["input_ids"].shape[1]
    params.__post_init__()
    assert params.seq_idx.shape == (1, 2 * params.total_tokens)
    return part


@small_packs()
def replay(sizes, room=None, modules=(), **config):
    with stand_ins():
        model = new_hybrid(**sizes, **config)
        packs = [(lengths, None) for lengths in PACKS] if room is None else [room]
        made = [rank_pack(sizes, lengths, seed=seed, room=room) for seed, (lengths, room) in enumerate(packs)]
        expected = [losses_and_gradients(model, arguments) for arguments in made]
        executor = ReferenceExecutor(isolated=without_exchanges(model.decoder, expert_group(model.decoder)))
        options = {"executor": executor, "cuda_graph_modules": list(modules), **BUCKETS}
        with graphs_on(model, made[0], **options) as graphs:
            indexed = rank_pack(sizes, packs[0][0], room=packs[0][1])["packed_seq_params"].seq_idx
            assert torch.equal(indexed, made[0]["packed_seq_params"].seq_idx)
            found = [losses_and_gradients(model, arguments) for arguments in made]
            statistics, regions = graphs.statistics(), len(graphs._regions)
    assert not statistics.fallbacks, statistics.fallbacks
    assert statistics.replays == len(made) * regions
    for (losses, gradients), (eager, eagers) in zip(found, expected, strict=True):
        assert_close([losses, *gradients], [eager, *eagers])
    return found


@pytest.mark.parametrize("sizes, modules", [(TP2, ()), (CP2, ("attn", "mamba"))], ids=["TP2, whole", "CP2, attn,mamba"])
def test_replays_equal_eager_on_every_rank(tmp_path, sizes, modules):
    run_ranks(2, replay, tmp_path, sizes, None, modules, **sizes)


def test_documents_with_padding_between_them(tmp_path):
    run_ranks(2, replay, tmp_path, CP2, ROOM, **CP2)


@dispatching_on_cpu()
def replay_experts():
    replay(EP2, pattern="ME*EM", **{**EXPERTS, "moe_token_dispatcher_type": "alltoall"})


def test_experts_of_two_ranks(tmp_path):
    run_ranks(2, replay_experts, tmp_path, **EP2)


def test_attention_that_gives_tokens_for_heads(tmp_path):
    run_ranks(2, partial(replay, cp_comm_type="a2a"), tmp_path, CP2, **CP2)


def test_two_context_parallel_ranks_equal_one(tmp_path):
    ranks = run_ranks(2, replay, tmp_path, CP2, **CP2)
    with stand_ins():
        whole = new_hybrid()
        for index, lengths in enumerate(PACKS):
            losses = whole(**hybrid_pack(lengths, seed=index))
            order = [place for rank in range(2) for place in held(lengths, 2, rank)]
            assert_close([torch.cat([rank[index][0] for rank in ranks], 1)], [losses.detach()[:, order]])
