"""Images that other data-parallel ranks encode: the plan, and that losses and gradients stay what they were."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from torch import distributed

from bridge_cg_plugin.options import OptionError, VisionGraphOptions
from bridge_cg_plugin.upstream.hooks.helpers.vision_helper import VisionTECudaGraphHelper
from bridge_cg_plugin.vision.balance import exchange
from bridge_cg_plugin.vision.balance import exchange_costs as exchange_costs
from bridge_cg_plugin.vision.balance.assignment import plan_moves
from bridge_cg_plugin.vision.host_grids import token_count
from tests.ranks import run_ranks

from .hugging_face_towers import new_qwen25, new_siglip
from .stages import build_stage, provider_of, train_step
from .test_rank_training import WIDTH, Model, no_gpu
from .towers import DEFAULTS, assert_close, draw, loss_of, new_tower

ROW = st.tuples(st.integers(1, 3), st.integers(1, 8), st.integers(1, 8)).map(lambda r: (r[0], 2 * r[1], 2 * r[2]))
GRIDS = st.lists(st.lists(ROW, max_size=6).map(tuple), min_size=1, max_size=6)


def loads_of(grids, encoders):
    loads = [0] * len(grids)
    for rows, places in zip(grids, encoders, strict=True):
        for row, rank in zip(rows, places, strict=True):
            loads[rank] += token_count((row,))
    return loads


@given(GRIDS, st.sampled_from([0.01, 0.1, 0.4]))
def test_a_plan_levels_what_pays_and_keeps_every_image(grids, share):
    plan = plan_moves(grids, share)
    before = [token_count(rows) for rows in grids]
    if plan is None:
        return
    after = loads_of(grids, plan.encoders)
    assert max(after) <= (1 - share) * max(before) and max(after) < max(before)
    assert sum(after) == sum(before) and plan.moved > 0
    assert all(load > 0 for load, had in zip(after, before, strict=True) if had)
    assert sorted(row for rank in range(len(grids)) for row in plan.encoded(rank)) == sorted(sum(grids, ()))
    for rank in range(len(grids)):
        assert token_count(plan.encoded(rank)) == after[rank] == sum(plan.received(rank))
        assert sum(plan.sent(rank)) == before[rank]
        assert [plan.sent(rank)[to] for to in range(len(grids))] == [
            plan.received(to)[rank] for to in range(len(grids))
        ]
        assert sorted(plan.order(rank)) == list(range(len(grids[rank])))
        encoders = [plan.encoders[rank][place] for place in plan.order(rank)]
        assert encoders == sorted(encoders)


@given(GRIDS)
@example([(), ((1, 2, 2),) * 2, ((1, 2, 2),) * 2])
def test_no_single_move_between_the_largest_and_the_smallest_would_help_a_plan(grids):
    plan = plan_moves(grids, 1e-9)
    encoders = plan.encoders if plan is not None else [[rank] * len(rows) for rank, rows in enumerate(grids)]
    loads = loads_of(grids, encoders)
    if plan is None and loads.count(max(loads)) > 1:
        return  # whatever moves, another rank keeps as many
    most, least = loads.index(max(loads)), loads.index(min(loads))
    held = [
        row
        for rows, places in zip(grids, encoders, strict=True)
        for row, e in zip(rows, places, strict=True)
        if e == most
    ]
    assert all(token_count((row,)) >= loads[most] - loads[least] for row in held)


@pytest.mark.parametrize(
    "grids, share, expected",
    [
        ([((1, 4, 4),) * 2, ()], 0.1, ((1, 0), ())),
        ([((1, 4, 4),), ()], 0.1, None),
        ([((1, 4, 4),) * 5, ((1, 4, 4),) * 4], 0.1, None),
        ([((1, 8, 8), (1, 4, 4)), ((1, 4, 4),)], 0.1, ((0, 1), (1,))),
        ([((1, 8, 8), (1, 4, 4)), ((1, 4, 4),)], 0.3, None),
    ],
    ids=["two to one", "one image", "even", "pays", "does not pay"],
)
def test_plans(grids, share, expected):
    plan = plan_moves(grids, share)
    assert (plan and plan.encoders) == expected


# Images of each rank in each of three microbatches; () is a text-only one.
LARGE, SMALL = ((1, 8, 8), (1, 4, 8), (1, 8, 4)), ((1, 4, 4),)
MICROBATCHES = {
    2: ((LARGE, SMALL), (LARGE, SMALL), (SMALL, SMALL)),
    3: ((LARGE, SMALL, LARGE), (SMALL, SMALL, LARGE), (SMALL + LARGE, SMALL, SMALL)),
}


def helper_on(model, encoder, balance, **options):
    chosen = VisionGraphOptions(**{**DEFAULTS, "balance": balance, **options})
    return VisionTECudaGraphHelper(model, encoder.config, num_microbatches=3, options=chosen)


def train_own_and_moved(overlap, options):
    """Train twice from the same weights: every image on its own rank, then where it pays on another."""
    return [train_data_parallel(balance, overlap, options) for balance in (None, 0.1)]


def train_data_parallel(balance, overlap, options):
    """Train a step of three microbatches on images of this rank's own; return losses, `main_grad`s and counts."""
    world, rank = distributed.get_world_size(), distributed.get_rank()
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=4096)
    with no_gpu():
        model = DistributedDataParallel(config, ddp, Model())
    helper = helper_on([model], model.module.vision_model, balance, **options)
    helper.create_cudagraphs()
    graphs = helper.graphs
    model.zero_grad_buffer()
    losses = []
    with no_gpu():
        with model.no_sync():
            for index in range(2):
                losses.append(model(MICROBATCHES[world][index][rank], 10 * rank + index))
                losses[-1].backward()
        losses.append(model(MICROBATCHES[world][2][rank], 10 * rank + 2))
        losses[-1].backward()
        model.finish_grad_sync()
    statistics = graphs.statistics()
    told = graphs.report()
    counts = sum(bucket.tokens for bucket in statistics.buckets.values()), dict(statistics.fallbacks)
    helper.delete_cuda_graphs()
    return [float(loss) for loss in losses], [p.main_grad.clone() for p in model.parameters()], counts, told


@pytest.mark.parametrize(
    "world, overlap, options",
    [(2, False, {}), (2, True, {}), (3, True, {}), (2, True, {"modules": ("mlp",)})],
    ids=["two ranks", "overlap", "three ranks", "parts of layers"],
)
def test_reduced_gradients_and_losses_are_what_they_were(tmp_path, world, overlap, options):
    ranks = run_ranks(world, train_own_and_moved, tmp_path, overlap, options)
    for (losses, gradients, _, told), (others, sums, _, note) in ranks:
        assert others == pytest.approx(losses, rel=1e-5)
        assert_close(sums, gradients, 1e-4)
        assert "balance:" not in told and "images of all ranks were moved, in " in note
    if options:
        return
    apart, level = ([rank[balance][2][0] for rank in ranks] for balance in (0, 1))
    assert sum(level) == sum(apart) and max(level) - min(level) < max(apart) - min(apart)
    assert all(rank[1][2][1] == {} for rank in ranks)
    assert apart == [sum(token_count(rows[rank]) for rows in MICROBATCHES[world]) for rank in range(world)]


def priced(ns_per_patch, exchange_ms):
    """Replace what this rank measures by given times, of each rank's own."""
    rank = distributed.get_rank()
    exchange_costs.EncodingTimes.ns_per_patch = lambda self: ns_per_patch[rank]
    exchange.measured_cost = lambda *unused: exchange_costs.ExchangeCost(exchange_ms[rank], 0.0)


def train_at_prices(ns_per_patch, exchange_ms):
    apart = train_data_parallel(None, True, {})
    priced(ns_per_patch, exchange_ms)
    return apart, train_data_parallel("auto", True, {})


# Levelling the two ranks takes 48 patches off the largest, in two of three microbatches.
SAVED_NS = 48 * 10_000


@pytest.mark.parametrize(
    "ns_per_patch, exchange_ms, pays",
    [
        ((10_000, 30_000), (SAVED_NS / 1e6 / 4.6, 0.01), True),
        ((10_000, 30_000), (SAVED_NS / 1e6 / 4.4, 0.01), False),
        ((30_000, 10_000), (0.01, SAVED_NS / 1e6 / 4.4), False),
        ((0, 10_000), (0.01, 0.01), True),
        ((0, 0), (0.0, 0.0), False),
    ],
    ids=["pays", "costs too much", "costs too much on another rank", "one rank knows", "nobody knows"],
)
def test_images_move_where_measured_times_say_that_it_pays(tmp_path, ns_per_patch, exchange_ms, pays):
    assert exchange_costs.PAYS * exchange_costs.EXCHANGES == 4.5
    for apart, auto in run_ranks(2, train_at_prices, tmp_path, ns_per_patch, exchange_ms):
        assert auto[0] == pytest.approx(apart[0], rel=1e-5)
        assert_close(auto[1], apart[1], 1e-4)
        assert ("in 2 microbatches; in 0 it" if pays else "in 0 microbatches; in 2 it") in auto[3]
        assert (auto[2] == apart[2]) is not pays


def train_auto():
    """Train with real measurements: what they say differs from machine to machine, and is one for all ranks."""
    apart, auto = train_data_parallel(None, True, {}), train_data_parallel("auto", True, {})
    return apart, auto, next(line for line in auto[3].splitlines() if "balance" in line)


def test_all_ranks_decide_alike_by_what_they_measured(tmp_path):
    (_, _, first), (_, _, second) = found = run_ranks(2, train_auto, tmp_path)
    assert first == second and "an exchange 0.00 ms" not in first
    for apart, auto, _ in found:
        assert auto[0] == pytest.approx(apart[0], rel=1e-5)
        assert_close(auto[1], apart[1], 1e-4)


class Script:
    """A clock whose marks are the times it is given."""

    def __init__(self, *times):
        self.times = list(times)

    def event(self):
        return self.times.pop(0)

    def elapsed(self, start, end):
        return None if end == "later" else float(end - start)


class Encoded:
    """A batch, and an encoder that needs nothing of it."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, batch):
        return (torch.ones(2, requires_grad=True) * 2,)


def encoded(times, tokens, backward=True):
    batch = Encoded(tokens)
    (output,) = times.encode(batch, batch)
    if backward:
        output.sum().backward()


def test_the_time_by_the_patch_is_the_slope_of_the_smallest_times():
    clock = Script(0, 1, 2, 4, 0, 1, 1, 2, 10, 20, 20, 21, 0, 1, 1, 9, 0, 0, 1, 2)
    times = exchange_costs.EncodingTimes(clock)
    assert times.ns_per_patch() == 0
    encoded(times, 100)  # 1 + 2 ms
    encoded(times, 100)  # 1 + 1 ms
    assert times.ns_per_patch() == 0
    encoded(times, 400)  # 10 + 1 ms
    assert times.ns_per_patch() == 9_000_000 // 300
    encoded(times, 400)  # 1 + 8 ms
    assert times.ns_per_patch() == 7_000_000 // 300
    with torch.no_grad():
        encoded(times, 800, backward=False)
    times.forget()
    assert times.ns_per_patch() == 0
    encoded(times, 400)
    assert clock.times == [] and times.ns_per_patch() == 0


def test_an_encoding_under_way_is_taken_over_when_it_has_ended():
    clock = Script(0, 1, 2, 3, 0, 1, 2, "later")
    times = exchange_costs.EncodingTimes(clock)
    encoded(times, 100)
    encoded(times, 200)
    assert times.ns_per_patch() == 0
    clock.elapsed = lambda start, end: 5.0 if end == "later" else float(end - start)
    assert times.ns_per_patch() == 40_000


def test_larger_batches_that_take_no_longer_make_no_move_pay():
    times = exchange_costs.EncodingTimes(Script(0, 9, 9, 10, 0, 1, 1, 2))
    encoded(times, 100)
    encoded(times, 400)
    assert times.ns_per_patch() == 0


def test_an_exchange_takes_a_part_for_each_microbatch_and_one_for_each_byte():
    rows = []

    def exchange(count):
        rows.append(count)
        return count * 1000

    few, many = exchange_costs.ROWS
    ends = [[0, 3, 0, 2, 0, 4, 0, 3], [0, 12, 0, 10, 0, 11, 0, 13]]
    cost = exchange_costs.measured_cost(Script(*ends[0], *ends[1]), exchange, lambda: None)
    assert rows == [few] * 5 + [many] * 5
    assert cost == exchange_costs.ExchangeCost(2.0, 8.0 / (1000 * (many - few)))
    assert cost.of(100, 50) == pytest.approx(3 * 2.0 + 5000 * cost.ms_per_byte)


# The first has images that the second could encode, and the other way round; one microbatch has none at all.
MIXED_TEXT = ([[(4, 4), (8, 4)], [], [], [(4, 4)]], [[], [(8, 8), (4, 4), (4, 4)], [], [(4, 4)]])


def train_real_model(balance):
    """Train a step of Bridge's whole model where ranks have microbatches without an image."""
    rank = distributed.get_rank()
    provider = provider_of(1)
    (model,) = build_stage(provider)
    helper = helper_on([model], model.vision_model, balance)
    helper.create_cudagraphs()
    losses, gradients = train_step([model], 4, 100 * rank, MIXED_TEXT[rank])
    names = [name for name, _ in model.named_parameters()]
    sums = [gradients.get(name, torch.zeros_like(p)) for name, p in model.named_parameters()]
    for gradient in sums:
        distributed.all_reduce(gradient, group=parallel_state.get_data_parallel_group())
    exchanged = helper.graphs.workload.exchange
    counts = (exchanged.microbatches, exchanged.moved) if exchanged is not None else None
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    helper.delete_cuda_graphs()
    left = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    return losses, dict(zip(names, sums, strict=True)), counts, (sum(hooks), sum(left))


def train_real_model_twice():
    return [train_real_model(balance) for balance in (None, 0.1)]


def test_a_rank_without_images_encodes_those_of_others(tmp_path):
    for (losses, sums, nothing, hooks), (others, found, counts, hooked) in run_ranks(
        2, train_real_model_twice, tmp_path
    ):
        assert nothing is None and counts == (2, 2)
        assert hooks[0] - 2 == hooks[1] == hooked[1] == hooked[0] - 6  # its batch is read first, by two
        assert torch.tensor(others).flatten().tolist() == pytest.approx(
            torch.tensor(losses).flatten().tolist(), rel=1e-5
        )
        assert_close(list(found.values()), list(sums.values()), 1e-4)
        assert float(sums["vision_model.patch_embed.proj.weight"].norm()) > 0


def encode_with_pixels_that_want_a_gradient(balance):
    """Encode on two ranks; the first one's pixels require a gradient. Returns both of its gradients and the counts."""
    rank = distributed.get_rank()
    model = new_tower()
    helper = helper_on(model, model, balance)
    helper.create_cudagraphs()
    pixels, grid = draw((SMALL, LARGE)[rank], rank)
    outputs, deepstack = model(pixels.requires_grad_(rank == 0), grid)
    loss_of([outputs, *deepstack]).backward()
    exchanged = helper.graphs.workload.exchange
    moved = exchanged.moved if exchanged is not None else 0
    gradients = [p.grad for p in model.parameters()]
    for gradient in gradients:
        distributed.all_reduce(gradient)
    return pixels.grad, gradients, moved, dict(helper.graphs.statistics().fallbacks)


def encode_twice():
    return [encode_with_pixels_that_want_a_gradient(balance) for balance in (None, 0.1)]


def test_a_rank_that_keeps_its_images_still_encodes_those_of_others(tmp_path):
    (own, level), (_, other) = run_ranks(2, encode_twice, tmp_path)
    assert own[3] == level[3] == {"input_gradients": 1} and other[3] == {}
    assert level[2] == other[2] > 0
    assert_close([level[0], *level[1]], [own[0], *own[1]], 1e-4)


def gather_many(images):
    """Tell others of more images than fit, on the first rank."""
    model = new_tower()
    helper = helper_on(model, model, 0.1)
    found = helper.graphs.workload.exchange._gathered(((1, 2, 2),) * (images if distributed.get_rank() == 0 else 1))
    return found


@pytest.mark.parametrize("images", [exchange.MOST_IMAGES, exchange.MOST_IMAGES + 1])
def test_ranks_hear_of_all_images_or_of_none(tmp_path, images):
    found = run_ranks(2, gather_many, tmp_path, images)
    fits = images <= exchange.MOST_IMAGES
    assert found == [[((1, 2, 2),) * images, ((1, 2, 2),)] if fits else [(), ()]] * 2


def build_alone():
    model = new_tower()
    return helper_on(model, model, 0.1).graphs.workload.exchange is None


def test_one_rank_has_nobody_to_exchange_with(tmp_path):
    assert run_ranks(2, build_alone, tmp_path, tensor_model_parallel_size=2) == [True, True]


def build_deterministic():
    model = new_tower()
    torch.use_deterministic_algorithms(True)
    with pytest.raises(OptionError, match="balance='auto': it must be a number .* with deterministic algorithms"):
        helper_on(model, model, "auto")
    return helper_on(model, model, 0.1).graphs.workload.exchange is not None


def test_times_decide_nothing_in_a_deterministic_run(tmp_path):
    assert run_ranks(2, build_deterministic, tmp_path) == [True, True]


@pytest.mark.parametrize("new", [new_qwen25, new_siglip])
def test_images_of_other_encoders_stay_on_their_ranks(new):
    model = new()
    with pytest.raises(OptionError, match="vision_cuda_graph_balance=0.1: it must be null with .*'s encoder"):
        VisionTECudaGraphHelper(model, model.config, options=VisionGraphOptions(impl="transformer_engine", balance=0.1))
