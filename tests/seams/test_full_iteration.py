"""Qwen3-VL under full_iteration: Bridge's model and step, megatron-core's schedule, the reference executor."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bridge_cg_plugin
from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.language import whole_model as workload_module
from bridge_cg_plugin.language.whole_model import dense_order
from bridge_cg_plugin.upstream.hooks.helpers import language_helpers
from bridge_cg_plugin.upstream.hooks.helpers.language_helpers import CURRENT
from bridge_cg_plugin.upstream.hooks.qwen3_vl import replays_one_length

from ..unit.towers import assert_close, graphs_on
from ..unit.vlm import Trainer, build, on_cpu, sample, wrapper
from ..unit.vlm import full_iteration as full_iteration_fields

ONE, TWO, TEXT = [(4, 4)], [(8, 4), (4, 4)], []
MIX = [ONE, TEXT, TWO, [(4, 8)]]


@pytest.fixture(autouse=True)
def _no_graphs_afterwards(active):
    yield
    CURRENT.delete_cuda_graphs()


def pair(**changes):
    """Return trainers of equal models: eager, and under helpers."""
    with on_cpu():
        return Trainer(build(graphs=False, **changes), graphs=False), Trainer(build(**changes), graphs=True)


def samples(mix, seed=0, text=8):
    return [sample(images, seed + index, text + 3 * index) for index, images in enumerate(mix)]


def assert_steps_equal(eager, graphs, steps, **arguments):
    """Run the same steps on both; losses, tokens and every parameter's gradient agree."""
    for data in steps:
        expected, found = eager.step(data, **arguments), graphs.step(data, **arguments)
        assert_close(found[0], expected[0], 1e-6)
        assert_close(found[1], expected[1], 1e-5)


def poison() -> None:
    """Overwrite the static memory of the language model's graphs."""
    for slot in CURRENT.graphs._regions[0].slots:
        for flat in slot.static.storages:
            flat.fill_(float("nan") if flat.dtype.is_floating_point else 1)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_losses_and_gradients_equal_eager(tied):
    eager, graphs = pair(tied=tied)
    assert_steps_equal(eager, graphs, [samples(MIX, step) for step in range(2)])
    poison()
    assert_steps_equal(eager, graphs, [samples(MIX, step) for step in range(2, 4)])
    assert (CURRENT.graphs.workload.steps, CURRENT.graphs.workload.replayed_steps) == (4, 3)
    assert not CURRENT.graphs.statistics().fallbacks
    assert all(graphs.parallel.arrived)
    assert "3 of 4 training steps replayed every microbatch" in CURRENT.graphs.report()


@pytest.mark.parametrize(
    "warm, then",
    [([TEXT], [TWO, TEXT, ONE]), ([ONE, TWO], [TEXT])],
    ids=["text-only warm-up, more microbatches", "text-only replays, fewer microbatches"],
)
def test_what_warm_up_did_not_show_replays_too(warm, then):
    eager, graphs = pair()
    assert_steps_equal(eager, graphs, [samples(warm), samples(then, 5), samples(then, 9)])
    assert CURRENT.graphs.workload.replayed_steps == 2


# Without an image nothing of a frozen language model needs a backward: that recording comes when it is asked for.
@pytest.mark.parametrize("frozen, replayed", [("vision_model", 3), ("language_model", 2)])
def test_a_frozen_part(frozen, replayed):
    trainers = []
    for graphs in (False, True):
        with on_cpu():
            model = build(graphs=graphs)
        getattr(model, frozen).requires_grad_(False)
        trainers.append(Trainer(model, graphs=graphs))
    assert_steps_equal(*trainers, [samples(MIX, step) for step in range(4)])
    assert len(trainers[1].trained) > 5 and all(p.main_grad.any() for p in trainers[1].trained)
    assert CURRENT.graphs.workload.replayed_steps == replayed


def test_beside_vision_graphs():
    eager, graphs = pair()
    vision = graphs.model.vision_model
    with graphs_on(vision, buckets=(16, 32, 64)) as encoder:
        assert_steps_equal(eager, graphs, [samples(MIX, step) for step in range(3)])
        assert encoder.statistics().replays == 9
    assert CURRENT.graphs.workload.replayed_steps == 2


def test_evaluation_replays_forward_only():
    eager, graphs = pair()
    assert_steps_equal(eager, graphs, [samples(MIX, step) for step in range(2)])
    assert_steps_equal(eager, graphs, [samples([ONE, TEXT], 7)], training=False)
    assert_steps_equal(eager, graphs, [samples(MIX, 9)])
    counts = CURRENT.graphs.statistics()
    assert sum(b.evaluations for b in counts.buckets.values()) == 2
    assert (CURRENT.graphs.workload.steps, CURRENT.graphs.workload.replayed_steps) == (3, 2)


def double_batch(seed=3):
    """Return a microbatch of two sequences."""
    double = sample(ONE, seed)
    for name in ("tokens", "labels", "loss_mask"):
        double[name] = double[name].repeat(2, 1)
    grid, pixels = double["visual_inputs"].image_grid_thw, double["visual_inputs"].pixel_values
    double["visual_inputs"].image_grid_thw = grid.repeat(2, 1)
    double["visual_inputs"].pixel_values = pixels.repeat(2, 1)
    return double


def test_a_microbatch_of_another_shape_runs_eager_and_is_counted():
    eager, graphs = pair()
    mixed = [sample(TWO, 4), double_batch(), sample(TEXT, 5)]
    assert_steps_equal(eager, graphs, [samples(MIX), mixed, mixed])
    assert CURRENT.graphs.statistics().fallbacks == {"other_shapes": 2}
    assert CURRENT.graphs.workload.replayed_steps == 0


def test_a_shape_that_comes_often_gets_graphs_of_its_own():
    eager, graphs = pair()
    steps = [[sample(TWO, 4 + seed), double_batch(seed), sample(TEXT, 5 + seed)] for seed in range(7)]
    assert_steps_equal(eager, graphs, [samples(MIX), *steps[:5]])
    found, workload = CURRENT.graphs.statistics(), CURRENT.graphs.workload
    # Three sightings make it known, the next step asks for it, the one after that replays.
    assert found.fallbacks == {"other_shapes": 3, "not_captured_yet": 1}
    assert workload.replayed_steps == 1
    poison()
    assert_steps_equal(eager, graphs, steps[5:])
    assert workload.replayed_steps == 3 and CURRENT.graphs.statistics().fallbacks == found.fallbacks
    assert len(found.pauses) == 1
    assert_steps_equal(eager, graphs, [[double_batch(9), sample(ONE, 7)]], training=False)
    assert sum(bucket.evaluations for bucket in CURRENT.graphs.statistics().buckets.values()) == 2


def test_a_shape_that_finds_no_memory_runs_eager(caplog):
    eager, graphs = pair()
    steps = [[sample(TWO, 4 + seed), double_batch(seed)] for seed in range(6)]
    assert_steps_equal(eager, graphs, [samples(MIX), steps[0]])
    with mock.patch.object(ReferenceExecutor, "record_forward", side_effect=torch.OutOfMemoryError("made to fail")):
        assert_steps_equal(eager, graphs, steps[1:])
    assert CURRENT.graphs.statistics().fallbacks == {"other_shapes": 5, "not_captured_yet": 1}
    assert sum("could not be captured" in record.message for record in caplog.records) == 1
    assert CURRENT.graphs.statistics().replays == 6


@pytest.mark.parametrize(
    "owner, name, value",
    [(language_helpers, "sharing_groups", lambda model: (object(),)), (workload_module, "MOST_SHAPES", 1)],
)
def test_as_many_shapes_are_recorded_as_may_be_and_one_by_ranks_that_share_layers(monkeypatch, owner, name, value):
    monkeypatch.setattr(owner, name, value)
    eager, graphs = pair()
    assert_steps_equal(eager, graphs, [samples(MIX), *[[sample(TWO, 4), double_batch()]] * 5])
    assert CURRENT.graphs.statistics().fallbacks == {"other_shapes": 5}


def test_a_failed_capture_leaves_the_run_eager(caplog):
    eager, graphs = pair()
    with mock.patch.object(ReferenceExecutor, "record_forward", side_effect=CaptureError("made to fail")):
        assert_steps_equal(eager, graphs, [samples(MIX, step) for step in range(3)])
    assert CURRENT.graphs.statistics().fallbacks == {"capture_failed": 8}
    assert "not captured: CaptureError: made to fail" in CURRENT.graphs.report()
    assert sum("runs eager" in record.message for record in caplog.records) == 1


def test_statistics_that_attention_leaves_in_attributes_keep_the_language_model_eager():
    eager, graphs = pair(qk_clip=True)
    assert_steps_equal(eager, graphs, [samples(MIX, step) for step in range(2)])
    assert CURRENT.graphs.statistics().fallbacks == {"capture_failed": 4}
    assert "not captured: CaptureError: qk_clip=true" in CURRENT.graphs.report()


@pytest.mark.parametrize("warmup_steps, replayed", [(0, 3), (1, 3), (2, 2), (9, 0)])
def test_capture_follows_the_warm_up_steps_and_at_least_one(warmup_steps, replayed):
    with on_cpu():
        graphs = Trainer(build(), graphs=True, warmup_steps=warmup_steps)
    for step in range(4):
        graphs.step(samples([ONE], step))
    assert CURRENT.graphs.workload.replayed_steps == replayed


def test_deactivate_gives_everything_back():
    _, graphs = pair()
    graphs.step(samples(MIX))
    graphs.step(samples(MIX))
    language_model = graphs.model.language_model
    assert "forward" in vars(language_model)
    before = [p.data_ptr() for p in language_model.parameters()]
    bridge_cg_plugin.deactivate()
    assert CURRENT.graphs is None and "forward" not in vars(language_model)
    assert "_deepstack_process" not in vars(language_model.decoder)
    assert [p.data_ptr() for p in language_model.parameters()] == before


def test_a_model_without_images_or_with_another_encoder_is_upstreams():
    schedule = mock.MagicMock()
    another = nn.Module()
    another.language_model, another.vision_model = nn.Linear(2, 2), nn.Linear(2, 2)
    another.vision_model.config = SimpleNamespace(hidden_size=2)
    captured = wrapper(schedule, warmup_steps=0)
    with mock.patch.object(type(captured), "data_read", side_effect=RuntimeError("upstream's own")):
        for model in ([nn.Linear(2, 2)], nn.Linear(2, 2), another):
            with pytest.raises(RuntimeError, match="upstream's own"):
                captured(model=model, data_iterator=[], num_microbatches=1, seq_length=4, forward_only=False)
    schedule.assert_not_called()


@pytest.mark.parametrize(
    "fields, padded",
    [
        (full_iteration_fields(), True),
        ({"cuda_graph_impl": "transformer_engine"}, True),
        ({"cuda_graph_impl": "none"}, False),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": None}, False),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]}, False),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, True),
        ({}, False),
    ],
)
def test_whose_sequences_are_padded(fields, padded):
    assert replays_one_length(SimpleNamespace(**fields)) is padded


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=4))
def test_rows_of_features_land_where_a_mask_puts_them(rows):
    width = max(map(len, rows))
    visual = torch.tensor([row + [False] * (width - len(row)) for row in rows])
    order = dense_order(visual)
    assert sorted(order.tolist()) == list(range(visual.numel()))
    features = torch.arange(1.0, 1 + int(visual.sum()))
    buffer = torch.zeros(visual.numel())
    buffer[: len(features)] = features
    expected = torch.zeros(visual.shape)
    expected[visual] = features
    torch.testing.assert_close(buffer.index_select(0, order).view(visual.shape), expected)
