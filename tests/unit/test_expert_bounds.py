"""Experts of more ranks with bounded room for tokens: eager's results, and eager itself where there is too little."""

import math
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import distributed
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from bridge_cg_plugin.language.experts import exchange as exchanges
from bridge_cg_plugin.language.experts.exchange import MARGIN, ExpertExchange, bounds_of, needed, room
from bridge_cg_plugin.switches import EXPERT_BOUNDS
from bridge_cg_plugin.upstream.parallel.process_groups import expert_group, without_collectives
from tests.ranks import run_ranks
from tests.routers import take_statistics
from tests.tape import TapeExecutor, TapeRecording, tensors

from .dispatching import dispatching_on_cpu
from .packs import losses_and_gradients, new_model, pack, replaying, small_packs
from .test_expert_ranks import EXPERTS, compare, on_graphs, options_of, own_packs
from .test_recompute import FULL, let_whole_layers_be_recomputed
from .towers import assert_close, poison

BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
NEVER = -100.0


def sized(ranks, **others):
    return {"expert_model_parallel_size": ranks, **others}


def bounded_model(ranks, experts=4, **changes):
    """Return a model of which each rank has so many experts: more tokens go to some, none to others."""
    config = {**EXPERTS, "moe_token_dispatcher_type": "alltoall", **BIAS, **sized(ranks), **changes}
    model = new_model(**{**config, "num_moe_experts": ranks * experts})
    skew(model, NEVER)
    return model


def skew(model, last):
    """Let more tokens go to the first expert, none to the second, and `last` be the bias for the last rank's."""
    for router in routers_of(model):
        its = router.expert_bias.shape[0] // router.config.expert_model_parallel_size
        router.expert_bias[:2] = torch.tensor([0.1, NEVER])
        router.expert_bias[-its:] = last


def flooded(model, work):
    """Run work on this rank while all its tokens go to the last rank's experts."""
    skew(model, -NEVER)
    try:
        return work()
    finally:
        skew(model, NEVER)


def routers_of(model):
    return [layer.mlp.router for layer in model.decoder.layers]


@contextmanager
def exchanges_on_tape():
    """Record exchanges as they are called: PyTorch's own operations would return before they have ended."""

    def on_tape(exchange):
        def call(*args, **kwargs):
            tape = _get_current_dispatch_mode()
            with _disable_current_modes():
                exchange(*args, **kwargs)
            places = [(tensor, tensor.data_ptr()) for tensor in tensors((args, kwargs))]
            tape._calls.append((exchange, args, kwargs, [], places))

        return call

    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
    with mock.patch.multiple(distributed, **{name: on_tape(getattr(distributed, name)) for name in names}):
        yield


class RankTape(TapeExecutor):
    """Records on all ranks at once."""

    def record_forward(self, body, pool):
        return TapeRecording(body, exchanges_on_tape)


def watched(monkeypatch):
    """Keep each rank's own flag before flags are summed, and draw random numbers, as a graph may."""
    own, agree = torch.zeros(1, dtype=torch.int32), ExpertExchange.agree

    def noting(exchange, overflow):
        own.copy_(overflow)
        torch.rand(3)
        agree(exchange, overflow)

    monkeypatch.setattr(ExpertExchange, "agree", noting)
    return own


@dispatching_on_cpu()
@small_packs()
def overflow_on_one_rank(ranks):
    """Run packs of which the last has too little room on rank 1 alone; then once more, with more room."""
    model, rank = bounded_model(ranks, moe_router_topk=1), distributed.get_rank()
    odd = pack((80, 44))
    packs = [*own_packs(3), odd]

    def run(each):
        once = partial(losses_and_gradients, model, each)
        return flooded(model, once) if each is odd and rank == 1 else once()

    take_statistics(routers_of(model))
    expected = list(map(run, packs))
    counts = take_statistics(routers_of(model))
    with pytest.MonkeyPatch.context() as monkeypatch, mock.patch.object(exchanges, "MARGIN", 1.0), ExitStack() as stack:
        own, flags = watched(monkeypatch), []
        isolated = without_collectives(expert_group(model.decoder))
        graphs = stack.enter_context(on_graphs(model, *packs[:3], executor=RankTape(isolated=isolated)))
        exchange, found, states = graphs.workload.family.exchange, [], []
        first = exchange.bounds
        take_statistics(routers_of(model))
        for each in packs:
            poison(graphs, float("nan"))
            before = torch.get_rng_state()
            with graphs.step():
                found.append(run(each))
            flags.append(bool(own.item()))
            states.append(torch.equal(before, torch.get_rng_state()))
        compare(found, expected)
        assert_close(take_statistics(routers_of(model)), counts)
        assert states == [False, False, False, True] and all(region.is_idle() for region in graphs._regions)
        assert graphs.statistics().fallbacks == {"experts_overflow": 1}
        with graphs.step():
            compare([run(odd)], expected[3:])
        assert exchange.bounds[0] > first[0]
        assert graphs.statistics().replays == 4 and graphs.statistics().fallbacks == {"experts_overflow": 1}
        assert graphs.statistics().pause_seconds > 0
        return flags


def test_ranks_run_eager_together_where_one_has_too_little_room(tmp_path, monkeypatch):
    monkeypatch.setenv(EXPERT_BOUNDS, "1")
    found = run_ranks(4, overflow_on_one_rank, tmp_path, 4, **sized(4))
    assert found == [[False, False, False, rank == 1] for rank in range(4)]


@contextmanager
def shards_on_cpu():
    """Let norms of PyTorch's have a part of the tokens each, and layers fork no random states, which are CUDA's."""
    original = WrappedTorchNorm.__new__

    def new(cls, config, *args, **kwargs):
        with mock.patch.object(config, "sequence_parallel", False):
            return original(cls, config, *args, **kwargs)

    no_fork = mock.patch.object(CudaRNGStatesTracker, "fork", lambda *unused: nullcontext())
    with mock.patch.object(WrappedTorchNorm, "__new__", new), no_fork:
        yield


@dispatching_on_cpu()
@small_packs()
@shards_on_cpu()
def replay(sizes, lengths=None):
    """Run packs of which some experts, and all of one rank, get no token; with lengths, layers are recomputed."""
    model = bounded_model(sizes["expert_model_parallel_size"], **sizes)
    groups = model.decoder.pg_collection
    assert groups.tp_ep.rank() == groups.ep.rank() * groups.expt_tp.size() + groups.expt_tp.rank()
    packs = own_packs(3) if lengths is None else [pack(lengths, seed) for seed in range(3)]

    def warm_up_further(model):
        model(**packs[1])
        if lengths is not None:
            let_whole_layers_be_recomputed(model, **FULL["each layer"])

    options = options_of(model, 128 if lengths is None else sum(lengths))
    with replaying(model, packs, before_capture=warm_up_further, **options) as graphs:
        return graphs.workload.family.exchange.bounds


@pytest.mark.parametrize(
    "world, sizes, lengths",
    [
        (8, sized(8), None),
        (4, sized(4, tensor_model_parallel_size=2, expert_tensor_parallel_size=1), (100, 28)),
        (4, sized(2, tensor_model_parallel_size=2, expert_tensor_parallel_size=2), (100, 28)),
    ],
    ids=["EP8", "TP2, EP4, recomputed", "TP2, ETP2, EP2, recomputed"],
)
def test_replays_equal_eagers_dispatcher(tmp_path, monkeypatch, world, sizes, lengths):
    monkeypatch.setenv(EXPERT_BOUNDS, "1")
    config = sizes | ({"sequence_parallel": True} if lengths else {})
    found = run_ranks(world, replay, tmp_path, config, lengths, **sizes)
    assert found[0] is not None and found == [found[0]] * world


@given(st.integers(1, 4000), st.floats(0, 9))
def test_room_is_for_the_part_of_any_batch(tokens, part):
    assert max(1, part * tokens) <= room(part, tokens) < part * tokens + exchanges.MULTIPLE + 1e-6 or part * tokens <= 1


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.randoms(use_true_random=False))
def test_what_a_pass_needs(tokens, ranks, its, random):
    chosen = [{random.randrange(ranks * its) for _ in range(random.randint(0, 3))} for _ in range(tokens)]
    routing_map = torch.zeros(tokens, ranks * its, dtype=torch.bool)
    for token, experts in enumerate(chosen):
        routing_map[token, list(experts)] = True
    there = [[{e for e in experts if e // its == rank} for experts in chosen] for rank in range(ranks)]
    needs = torch.stack([needed(each, ranks) for each in (torch.zeros_like(routing_map), routing_map)])
    with mock.patch.object(distributed, "all_reduce"):
        sent, computed = bounds_of([needs], None)
    assert sent * tokens == pytest.approx(1.25 * max(sum(map(bool, each)) for each in there))
    assert computed * tokens == pytest.approx(1.25 * max(sum(map(len, each)) for each in there))


# Hidden size, an expert's, how many experts there are, and to how many of them a token goes.
PLANNED = {
    "Qwen3-VL-30B-A3B": (2048, 768, 128, 8),
    "Qwen3-VL-235B-A22B": (4096, 1536, 128, 8),
    "Qwen3.6-35B-A3B": (2048, 512, 256, 8),
}
PAGE = Path(__file__).parents[2] / "docs" / "packed.md"


@pytest.mark.parametrize("name", PLANNED)
def test_the_page_plans_what_exchanges_have_room_for(name):
    hidden, inner, experts, chosen = PLANNED[name]
    tokens, expected = 8192, []
    for ranks, bounded in ((8, False), (8, True), (64, True)):
        places, rows = tokens, ranks * tokens * min(chosen, experts // ranks)
        if bounded:
            reached = 1 - math.comb(experts - experts // ranks, chosen) / math.comb(experts, chosen)
            places, rows = room(MARGIN * reached, tokens), room(MARGIN * chosen / ranks, ranks * tokens)
        kept = rows * 3 * inner * 2 + ranks * places * hidden * 2
        sent = 2 * ranks * places * hidden * (2 + 4)  # tokens in bf16, their sums in fp32, in each pass
        expected += [kept / 1e9, sent / 1e9]
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |"))
    found = [float(number) for cell in row.split("|")[2:-1] for number in cell.split(",")]
    assert found == pytest.approx(expected, rel=0.1)
