"""Bridge's Qwen3-VL over the stages of a pipeline, interleaved and not: graphs equal eager, slots are what it needs."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import num_microbatches_calculator as calculator
from megatron.core.pipeline_parallel import schedules

import bridge_cg_plugin
from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.hooks.any_loop import LOOPS
from bridge_cg_plugin.upstream.hooks.helpers.constructors import encoder_helper
from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_helpers
from bridge_cg_plugin.upstream.parallel.process_groups import microbatches_in_flight
from tests.ranks import run_ranks

from .stages import build_stage, provider_of, train_step
from .towers import DEFAULTS, assert_close


def pipeline(stages, virtual=None):
    sizes = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": virtual}
    return {name: size for name, size in sizes.items() if size is not None}


def helper_on(chunks, provider, microbatches, slots="auto"):
    encoder = chunks[0].vision_model
    provider.vision_cuda_graph_impl = "transformer_engine"
    options = VisionGraphOptions(**{**DEFAULTS, "slots": slots})
    return encoder and encoder_helper(chunks, encoder.config, num_microbatches=microbatches, options=options)


def eager_and_graphs(stages, virtual, microbatches, slots):
    provider = provider_of(stages, virtual)
    chunks = build_stage(provider)
    eager = train_step(chunks, microbatches)
    helper = helper_on(chunks, provider, microbatches, slots)
    if helper is not None:
        helper.create_cudagraphs()
    graphed = train_step(chunks, microbatches)
    found = None
    if helper is not None:
        statistics = helper.graphs.statistics()
        found = helper.graphs.slots, statistics.replays, dict(statistics.fallbacks)
        assert sum(slot.free for slot in helper.graphs._regions[0].slots) == helper.graphs.slots
        helper.delete_cuda_graphs()
    return eager, graphed, found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Losses and gradients of the model on one rank."""
    (found,) = run_ranks(1, train_alone, tmp_path_factory.mktemp("whole"), 8)
    return found


def train_alone(microbatches):
    return train_step(build_stage(provider_of(1)), microbatches)


@pytest.mark.parametrize(
    "stages, virtual, slots, expected",
    [(2, None, "auto", (2, 8, {})), (2, 2, 3, (3, 6, {"no_free_slot": 2}))],
    ids=["PP2", "PP2, interleaved, a slot less"],
)
def test_stages_train_as_the_whole_model_eager_and_on_graphs(tmp_path, whole, stages, virtual, slots, expected):
    ranks = run_ranks(stages, eager_and_graphs, tmp_path, stages, virtual, 8, slots, **pipeline(stages, virtual))
    assert [found for _, _, found in ranks] == [expected, *[None] * (stages - 1)]
    losses, gradients = whole
    for (eager_losses, eager), (graphed_losses, graphed), _ in ranks:
        assert_close(list(graphed.values()), [eager[name] for name in graphed], 1e-4)
        assert_close(list(eager.values()), [gradients[name] for name in eager], 1e-4)
        assert torch.tensor(graphed_losses).flatten().tolist() == pytest.approx(flat(eager_losses), rel=1e-5)
    assert flat(ranks[-1][0][0]) == pytest.approx(flat(losses), rel=1e-5)
    assert {name for eager, _, _ in ranks for name in eager[1]} == gradients.keys()


ROWS = {"cuda_graph_impl": "full_iteration"}


def eager_and_layers(stages, virtual, microbatches, packs):
    """Train a step eager, and one with the language model's layers on graphs; return both and what was replayed."""
    provider = provider_of(stages, virtual, packs)
    fields = {"cuda_graph_impl": "transformer_engine", "cuda_graph_max_packed_seqs": 2} if packs else ROWS
    vars(provider).update(fields)  # before Bridge's model looks at them
    chunks = build_stage(provider)
    provider.cuda_graph_impl = "none"
    eager = train_step(chunks, microbatches)
    vars(provider).update(fields)
    constant = calculator.ConstantNumMicroBatchesCalculator(microbatches, 1, 1, False, 0)
    calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR = constant
    LOOPS.bridges_driver(chunks, provider)
    train_step(chunks, microbatches, seed=50)
    helpers = active_helpers()
    for helper in helpers:
        helper.create_cudagraphs()
    every = [helper.graphs for helper in helpers]
    for _ in range(3):  # further microbatches in flight are captured before the second
        before = [graphs.statistics().replays for graphs in every]
        with ExitStack() as stack:
            for graphs in every:
                stack.enter_context(graphs.step())
            graphed = train_step(chunks, microbatches)
    replays = [graphs.statistics().replays - count for graphs, count in zip(every, before, strict=True)]
    found = list(zip(replays, (graphs.workload.additions() for graphs in every), strict=True))
    LOOPS.end_bridges()
    return eager, graphed, found


@pytest.mark.parametrize("packs", [False, True], ids=["rows", "packs"])
@pytest.mark.parametrize("virtual", [None, 2], ids=["PP2", "PP2, interleaved"])
def test_layers_of_stages_train_as_eager(tmp_path, virtual, packs):
    """Upstream has all layers that add features of images on the first stage, in its first chunk."""
    ranks = run_ranks(2, eager_and_layers, tmp_path, 2, virtual, 8, packs, **pipeline(2, virtual))
    for rank, ((eager_losses, eager), (graphed_losses, graphed), found) in enumerate(ranks):
        assert flat(graphed_losses) == flat(eager_losses)
        assert_close([graphed[name] for name in eager], list(eager.values()), 1e-5)
        assert found == [(8, int(rank == chunk == 0)) for chunk in range(virtual or 1)]
    assert flat(ranks[-1][0][0])


def flat(losses):
    return [value for each in losses for value in each]


def build_as_released(stages, virtual):
    bridge_cg_plugin.deactivate()
    try:
        build_stage(provider_of(stages, virtual))
    except AssertionError as error:
        return str(error)
    return None


def test_as_released_no_interleaved_stage_can_be_built(tmp_path):
    """What the patch is for; a release where this fails needs it no more."""
    found = run_ranks(2, build_as_released, tmp_path, 2, 2, **pipeline(2, 2))
    assert all("vp_stage must be provided" in said for said in found)


def schedule_of_batch_sizes():
    """Let steps have 1, 2 and then 4 microbatches, by the installed release's calculator."""
    if hasattr(calculator, "StepBatchsizeNumMicroBatchesCalculator"):
        made = calculator.StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 0, "0:1 1:2 5:4")
    else:
        made = calculator.RampupBatchsizeNumMicroBatchesCalculator(4, 1, 1, False, 0, 1, 1, 6)
    calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR = made


def ramp_up(stages, late):
    """Train six steps whose microbatches grow, and then one that is small again; return what every step left.

    Args:
        stages: Of the pipeline.
        late: Whether the schedule comes after the helper was made, as from a callback at the start of training.
    """
    provider = provider_of(stages)
    constant = calculator.ConstantNumMicroBatchesCalculator(1, 1, 1, False, 0)
    if late:
        calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR = constant
    else:
        schedule_of_batch_sizes()
    plain = build_stage(provider)
    chunks = build_stage(provider)
    helper = helper_on(chunks, provider, calculator.get_num_microbatches())
    schedule_of_batch_sizes()
    if helper is not None:
        helper.create_cudagraphs()
    samples, sizes, left = 0, [], []
    for step in range(7):
        calculator.update_num_microbatches(samples if step < 6 else 0)
        sizes.append(calculator.get_num_microbatches())
        samples += sizes[-1]
        eager, graphed = (train_step(model, sizes[-1], 10 * step) for model in (plain, chunks))
        assert flat(graphed[0]) == pytest.approx(flat(eager[0]), rel=1e-5)
        assert_close(list(graphed[1].values()), list(eager[1].values()), 1e-4)
        if helper is not None:
            statistics = helper.graphs.statistics()
            region = helper.graphs._regions[0]
            recordings = len(region.sources.current.recordings)
            left.append(
                (
                    sum(slot.free for slot in region.slots),
                    recordings,
                    statistics.memory_bytes,
                    dict(statistics.fallbacks),
                )
            )
    return sizes, left, helper and helper.graphs.statistics().replays


@pytest.mark.parametrize("stages, late", [(1, False), (2, True)])
def test_microbatches_that_grow_and_shrink_need_no_new_capture_and_leave_nothing(tmp_path, stages, late):
    ranks = run_ranks(stages, ramp_up, tmp_path, stages, late, **pipeline(stages))
    sizes, left, replays = ranks[0]
    assert sizes[0] == 1 and max(sizes) == 4 and sizes[-1] == 1
    assert replays == sum(sizes)
    assert left[0][0] == stages and left[0][3] == {}
    assert all(after == left[0] for after in left)
    assert [rank[1] for rank in ranks[1:]] == [[]] * (stages - 1)


def config(stages, virtual=None, in_a_row=None, overlap=False):
    return SimpleNamespace(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual,
        microbatch_group_size_per_vp_stage=in_a_row,
        overlap_moe_expert_parallel_comm=overlap,
    )


@pytest.mark.parametrize(
    "stages, virtual, microbatches, expected",
    [(1, None, 8, 1), (4, None, 8, 4), (4, None, 2, 2), (4, 2, 16, 8), (None, None, 1, 1)],
)
def test_microbatches_of_the_first_stage(stages, virtual, microbatches, expected):
    assert microbatches_in_flight(config(stages, virtual), microbatches) == expected


@given(st.data())
def test_slots_of_an_interleaved_schedule_are_what_megatrons_own_tables_say(data):
    stages, virtual = data.draw(st.integers(2, 6)), data.draw(st.integers(2, 5))
    in_a_row = data.draw(st.integers(stages, 3 * stages))
    microbatches = data.draw(st.integers(in_a_row, 6 * in_a_row))
    overlap = data.draw(st.booleans())
    first_stage = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: stages, rank=lambda: 0), virtual_pipeline_model_parallel_size=virtual
    )
    _, _, ahead, _ = schedules.get_pp_rank_microbatches(
        microbatches, virtual, in_a_row, overlap_moe_expert_parallel_comm=overlap, p2p_communicator=first_stage
    )
    chunks = [chunk for _, chunk in schedules.get_schedule_table(microbatches, virtual, in_a_row)]
    forwards = [turn for turn, chunk in enumerate(chunks) if chunk == 0]
    backwards = [turn + ahead + 1 for turn, chunk in enumerate(chunks) if chunk == virtual - 1]  # before this forward
    most = max(sum(f <= now for f in forwards) - sum(b <= now for b in backwards) for now in range(len(chunks)))
    assert microbatches_in_flight(config(stages, virtual, in_a_row, overlap), microbatches) == most
