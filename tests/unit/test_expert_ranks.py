"""Experts of several ranks inside packed graphs: equal to eager's dispatcher, on graphs together or not at all."""

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import distributed

from bridge_cg_plugin.attention_bounds import refuse_pack
from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.language.experts.exchange import ExpertExchange
from bridge_cg_plugin.language.packed import workload as shape_exchange
from bridge_cg_plugin.language.packed.batch import OFFSETS, PADDED_OFFSETS, PackShape
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.parallel.process_groups import (
    expert_group,
    shared_group,
    sharing_groups,
    without_collectives,
)
from tests.ranks import run_ranks

from .dispatching import dispatching_on_cpu
from .packs import EXPERTS, graphs_on, losses_and_gradients, new_model, pack, part_of, replaying, small_packs, unpacked
from .towers import assert_close

EP2 = {"expert_model_parallel_size": 2}


def rank_model(seed=0, **changes):
    """Return a model whose experts two ranks share; on one rank of context parallelism each has its own packs."""
    return new_model(seed, **{**EXPERTS, "moe_token_dispatcher_type": "alltoall", **EP2, **changes})


def executor_of(model):
    groups = (*sharing_groups(model.decoder), expert_group(model.decoder))
    return ReferenceExecutor(isolated=without_collectives(*groups))


def options_of(model, *buckets):
    """Return options of graphs of a model on a rank."""
    buckets = list(buckets or (80, 128))
    return {"executor": executor_of(model), "cuda_graph_modules": [], "cuda_graph_packed_buckets": buckets}


def on_graphs(model, *warmup, **options):
    return graphs_on(model, *(warmup or (pack((25, 40, 12)),)), **options_of(model) | options)


def drawn(generator):
    """Return the lengths of a pack that a bucket takes."""
    lengths = [generator.randint(1, 50) for _ in range(generator.randint(1, 5))]
    while sum(lengths) > 125:
        lengths.pop()
    return (*lengths, max(65 - sum(lengths), 1))


def own_packs(count, seed=0):
    """Return packs of this rank's."""
    rank = distributed.get_rank()
    generator = random.Random(f"{seed} {rank}")
    return [pack(drawn(generator), seed=2 * number + rank) for number in range(count)]


def compare(found, expected):
    for (losses, gradients), (eager, eagers) in zip(found, expected, strict=True):
        assert_close([losses, *gradients], [eager, *eagers])


@dispatching_on_cpu()
@small_packs()
def replay(changes):
    model, packs = rank_model(**changes), own_packs(4)
    if changes.get("context_parallel_size"):
        packs = [part_of(pack((160 - 4 * n, 4 * n), n), 2, distributed.get_rank()) for n in (1, 10, 18, 25)]
    with replaying(model, packs, **options_of(model, 128, 160)) as graphs:
        assert len(graphs._regions) == 1
        return len(graphs.workload.shapes[0].each)


MODELS = {
    "more experts than a rank has": {"moe_router_topk": 3},
    "shared experts": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    "a loss of sequences": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
    "a bias of experts": {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_replays_equal_eagers_dispatcher(tmp_path, changes):
    assert run_ranks(2, replay, tmp_path, changes, **EP2) == [2, 2]


def test_ranks_that_share_a_pack_ask_nobody(tmp_path):
    sizes = {"context_parallel_size": 2, **EP2}
    assert run_ranks(2, replay, tmp_path, {"context_parallel_size": 2}, **sizes) == [1, 1]


# What one rank is given while the other has a pack that fits: its pack, and what both count.
BEYOND = {"documents": (((10,) * 8,), ["too_many_documents"] * 2), "unpacked": (None, ["unpacked_batch", "other_rank"])}


@dispatching_on_cpu()
@small_packs()
def fall_back(lengths, odd):
    model, rank = rank_model(), distributed.get_rank()
    packs = own_packs(3)
    if rank == odd:
        packs[1] = unpacked() if lengths is None else pack(*lengths)
    expected = [losses_and_gradients(model, arguments) for arguments in packs]
    with on_graphs(model) as graphs:
        compare([losses_and_gradients(model, arguments) for arguments in packs], expected)
        statistics = graphs.statistics()
    assert statistics.replays == 2
    return list(statistics.fallbacks)


@pytest.mark.parametrize("odd, lengths, reasons", [(n, *case) for n, case in enumerate(BEYOND.values())], ids=BEYOND)
def test_all_ranks_run_eager_where_one_must(tmp_path, lengths, reasons, odd):
    found = run_ranks(2, fall_back, tmp_path, lengths, odd, **EP2)
    assert [reason for rank in (odd, 1 - odd) for reason in found[rank]] == reasons


@dispatching_on_cpu()
@small_packs()
def differ_on_one_rank():
    """Have a hook on one rank for a microbatch, then keep what a pass without a backward returned, as for a log."""
    model, packs, differs = rank_model(), own_packs(4), distributed.get_rank()
    expected = [losses_and_gradients(model, arguments) for arguments in (packs[0], *packs)]
    with on_graphs(model, cuda_graph_packed_strict=False) as graphs:
        found = [losses_and_gradients(model, packs[0])]
        hook = model.decoder.layers[0].register_forward_hook(lambda *args: None) if differs else None
        found.append(losses_and_gradients(model, packs[0]))
        if hook is not None:
            hook.remove()
        found.append(losses_and_gradients(model, packs[1]))
        kept = [model(**packs[1])][:differs]
        found.append(losses_and_gradients(model, packs[2]))
        kept.clear()
        found.append(losses_and_gradients(model, packs[3]))
        compare(found, expected)
        return graphs.statistics().replays, dict(graphs.statistics().fallbacks)


def test_a_rank_whose_model_or_slots_differ_makes_all_eager(tmp_path):
    assert run_ranks(2, differ_on_one_rank, tmp_path, **EP2) == [(4, {"other_rank": 2})] * 2


@dispatching_on_cpu()
def grow():
    """Return the buckets of a run with small and large packs in turn, other ones on each rank, and what it counts."""
    model, rank = rank_model(), distributed.get_rank()
    sizes = [(270 + 60 * ((step + rank) % 3), 960 - 40 * rank)[step % 2] for step in range(16)]
    packs = [pack((size - 90, 90), seed=2 * number + rank) for number, size in enumerate(sizes)]
    expected = [losses_and_gradients(model, arguments) for arguments in packs]
    options = {"cuda_graph_packed_buckets": "auto"}
    with on_graphs(model, packs[0], **options) as graphs:
        found = []
        for arguments in packs:
            with graphs.step():
                found.append(losses_and_gradients(model, arguments))
        compare(found, expected)
        statistics = graphs.statistics()
    return [str(bucket) for bucket in statistics.buckets], statistics.replays, dict(statistics.fallbacks)


def test_buckets_on_demand_are_those_of_all_ranks(tmp_path):
    first, second = run_ranks(2, grow, tmp_path, **EP2)
    assert first == second
    assert len(first[0]) > 1 and first[1] > 8


@dispatching_on_cpu()
@small_packs()
def stay_in_parts():
    """Return what ranks replay where experts stay eager: packs that differ are no business of the other rank."""
    model, rank = rank_model(), distributed.get_rank()
    packs = [pack((10,) * 8), pack((75,))] if rank else [pack((75,)), pack((75,))]
    expected = [losses_and_gradients(model, arguments) for arguments in packs]
    options = {"cuda_graph_modules": ["attn", "moe_router"], "cuda_graph_packed_buckets": [80]}
    with graphs_on(model, pack((75,)), **options) as graphs:
        compare([losses_and_gradients(model, arguments) for arguments in packs], expected)
        return dict(graphs.statistics().fallbacks)


def test_parts_of_layers_replay_by_themselves(tmp_path):
    assert run_ranks(2, stay_in_parts, tmp_path, **EP2) == [{}, {"too_many_documents": 1}]


def exchange():
    """Return what the tokens of both ranks chose, with the gradient of what this rank gave."""
    rank, ranks = distributed.get_rank(), ExpertExchange(distributed.group.WORLD)
    torch.manual_seed(0)
    scores, chosen = torch.rand(2, 5, 6), torch.rand(2, 5, 6) < 0.5
    scores[0, 1, 2], chosen[0, 1, 2] = torch.nan, True
    scores[1, 0, 0], chosen[1, 0, 0] = 0.0, True
    used, weights = (5, 3)[rank], torch.rand(2, 10, 3)
    own = scores[rank].clone().requires_grad_()
    of_rank = torch.tensor([used], dtype=torch.int32)
    found, routing_map, count = ranks.lanes(chosen[rank], of_rank).choices(own, chosen[rank], of_rank)
    chosen[1, 3:] = False
    right = torch.cat([scores[each][:, 3 * rank : 3 * rank + 3] for each in range(2)])
    its = torch.cat([chosen[each][:, 3 * rank : 3 * rank + 3] for each in range(2)])
    assert torch.equal(routing_map, its) and count.tolist() == [10] and count.dtype is torch.int32
    torch.testing.assert_close(found[its], right[its], equal_nan=True, rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(found, own, torch.where(its, weights[rank], 0))
    wanted = torch.cat([weights[owner][5 * rank : 5 * rank + 5] for owner in range(2)], 1)
    assert torch.equal(gradient, torch.where(chosen[rank], wanted, 0))
    with without_collectives(distributed.group.WORLD)():  # kernels follow the map, also in such a pass
        its = ranks.lanes(chosen[rank], count).choices(own, chosen[rank], count)[1]
    assert torch.equal(its, torch.cat((chosen[rank][:, :3], chosen[rank][:, 3:])))


def test_what_tokens_chose_and_its_gradient(tmp_path):
    run_ranks(2, exchange, tmp_path)


@given(
    lengths=strategies.lists(strategies.integers(0, 300), min_size=1, max_size=9).filter(any),
    room=strategies.integers(0, 50),
    layout=strategies.sampled_from([OFFSETS, PADDED_OFFSETS, (*OFFSETS, *PADDED_OFFSETS)]),
    bucket=strategies.tuples(strategies.integers(1, 3000), strategies.integers(1, 9), strategies.integers(1, 400)),
)
def test_buckets_take_what_is_told_of_a_pack_as_the_pack(lengths, room, layout, bucket):
    shape = PackShape(sum(lengths) + room, tuple(lengths), layout, 8, (None, None))
    told = shape_exchange._shape(shape_exchange._numbers(shape))
    assert (told.tokens, told.layout, told.rotated, told.additions) == (shape.tokens, layout, 8, (None, None))
    tokens, documents, longest = bucket
    for shards, ranks in ((1, 1), (2, 1), (1, 2)):
        sizes = (256, Bucket(tokens, (documents, longest)), shards, ranks)
        assert refuse_pack(told.lengths, told.tokens, *sizes) == refuse_pack(shape.lengths, shape.tokens, *sizes)


def groups_of_layers_and_experts():
    model = SimpleNamespace(pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    experts = expert_group(model)
    try:
        return distributed.get_process_group_ranks(shared_group(model, experts))
    except OptionError as error:
        return str(error)


def test_ranks_that_are_on_graphs_together(tmp_path):
    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}

    def groups(world, experts):
        (folder := tmp_path / str(experts)).mkdir()
        return run_ranks(world, groups_of_layers_and_experts, folder, expert_model_parallel_size=experts, **sizes)

    assert groups(4, 4) == [[0, 1, 2, 3]] * 4
    assert groups(4, 2) == [[0, 1]] * 2 + [[2, 3]] * 2
    found = groups(6, 3)
    assert all("expert_model_parallel_size=3: it must be a multiple or divisor" in said for said in found)
