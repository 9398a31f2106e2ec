"""Qwen3-VL under full_iteration: Bridge's model and step, megatron-core's schedule, the reference executor."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import nn

import bridge_cg_plugin
from bridge_cg_plugin.language.packed import batch as batch_module
from bridge_cg_plugin.language.packed import workload as workload_module
from bridge_cg_plugin.upstream.hooks.any_loop import LOOPS
from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs
from bridge_cg_plugin.upstream.kernels import recompute

from ..unit.packs import EXPERTS
from ..unit.towers import assert_close
from ..unit.vlm import HIDDEN, SEQUENCE, Trainer, build, on_cpu, sample, wrapper

ONE, TWO, TEXT = [(4, 4)], [(8, 4), (4, 4)], []
MIX = [ONE, TEXT, TWO, [(4, 8)]]


@pytest.fixture(autouse=True)
def _nothing_left(active, monkeypatch):
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    yield
    LOOPS.end_bridges()


def layers():
    """Return the graphs of the language model's layers."""
    (found,) = [graphs for graphs in active_graphs() if graphs.workload.group == "language_model_cuda_graph"]
    return found


def counts():
    """Return how many microbatches replayed, those of evaluations apart, and why others did not."""
    found = layers().statistics()
    evaluations = sum(bucket.evaluations for bucket in found.buckets.values())
    return found.replays - evaluations, evaluations, found.fallbacks


def pair(**changes):
    """Return trainers of equal models: eager, and under helpers."""
    with on_cpu():
        return Trainer(build(graphs=False, **changes), graphs=False), Trainer(build(**changes), graphs=True)


def samples(mix, seed=0, text=8):
    return [sample(images, seed + index, text + 3 * index) for index, images in enumerate(mix)]


def assert_steps_equal(eager, graphs, steps, losses=0.0, **arguments):
    """Run the same steps on both; losses agree, to the bit unless told otherwise, and every parameter's gradient."""
    for data in steps:
        expected, found = eager.step(data, **arguments), graphs.step(data, **arguments)
        assert_close(found[0], expected[0], losses)
        assert_close(found[1], expected[1], 1e-5)


def poison() -> None:
    """Overwrite the static memory of the graphs."""
    for slot in layers()._regions[0].slots:
        for flat in slot.static.storages:
            flat.fill_(float("nan") if flat.dtype.is_floating_point else 1)


def test_losses_and_gradients_equal_eager():
    eager, graphs = pair(tied=True)
    assert_steps_equal(eager, graphs, [samples(MIX, step) for step in range(2)])
    poison()
    assert_steps_equal(eager, graphs, [samples(MIX, step) for step in range(2, 4)])
    assert counts() == (12, 0, {})
    assert all(graphs.parallel.arrived)


@pytest.mark.parametrize(
    "warm, then",
    [([TEXT], [TWO, TEXT, ONE]), ([ONE, TWO], [TEXT])],
    ids=["text-only warm-up, more microbatches", "text-only replays, fewer microbatches"],
)
def test_what_warm_up_did_not_show_replays_too(warm, then):
    eager, graphs = pair()
    assert_steps_equal(eager, graphs, [samples(warm), samples(then, 5), samples(then, 9)])
    assert counts() == (2 * len(then), 0, {})


# Without an image nothing of a frozen language model needs a backward: that recording comes when it is asked for.
@pytest.mark.parametrize("frozen, replayed", [("vision_model", 12), ("language_model", 11)])
def test_a_frozen_part(frozen, replayed):
    trainers = []
    for graphs in (False, True):
        with on_cpu():
            model = build(graphs=graphs)
        getattr(model, frozen).requires_grad_(False)
        trainers.append(Trainer(model, graphs=graphs))
    assert_steps_equal(*trainers, [samples(MIX, step) for step in range(4)])
    assert len(trainers[1].trained) > 5 and all(p.main_grad.any() for p in trainers[1].trained)
    assert sum(counts()[:2]) == replayed


# Of two sequences the angles are no contiguous tensor, whose cosine PyTorch rounds otherwise on a CPU.
TWO_SEQUENCES = 1e-6


def double_batch(seed=3):
    """Return a microbatch of two sequences."""
    double = sample(ONE, seed)
    for name in ("tokens", "labels", "loss_mask"):
        double[name] = double[name].repeat(2, 1)
    grid, pixels = double["visual_inputs"].image_grid_thw, double["visual_inputs"].pixel_values
    double["visual_inputs"].image_grid_thw = grid.repeat(2, 1)
    double["visual_inputs"].pixel_values = torch.cat([pixels, pixels.flip(0)])
    return double


def test_a_shape_that_comes_later_gets_graphs_of_its_own():
    eager, graphs = pair()
    steps = [[sample(TWO, 4 + seed), double_batch(seed), sample(TEXT, 5 + seed)] for seed in range(4)]
    assert_steps_equal(eager, graphs, [samples(MIX), *steps[:2]], TWO_SEQUENCES)
    assert counts() == (5, 0, {"not_captured_yet": 1})
    poison()
    assert_steps_equal(eager, graphs, steps[2:], TWO_SEQUENCES)
    assert_steps_equal(eager, graphs, [[double_batch(9), sample(ONE, 7)]], TWO_SEQUENCES, training=False)
    assert counts() == (11, 2, {"not_captured_yet": 1})


def test_each_length_that_sequences_are_padded_to_gets_graphs(monkeypatch):
    monkeypatch.setattr(batch_module, "ROW_UNIT", 16)
    eager, graphs = pair()
    assert_steps_equal(eager, graphs, [samples(MIX, step) for step in range(2)])
    poison()
    assert_steps_equal(eager, graphs, [samples(MIX, step) for step in range(2, 5)])
    assert counts() == (16, 0, {})
    assert {bucket.limits for bucket in layers()._regions[0].buckets} == {(1, 16), (1, 32), (1, 48)}


def test_as_many_shapes_are_captured_as_may_be(monkeypatch):
    monkeypatch.setattr(workload_module, "MOST_SHAPES", 1)
    eager, graphs = pair()
    assert_steps_equal(eager, graphs, [samples(MIX), *[[sample(TWO, 4), double_batch()]] * 3], TWO_SEQUENCES)
    assert counts() == (3, 0, {"other_shapes": 3})


def test_experts_are_inside_the_graph():
    eager, graphs = pair(**EXPERTS)
    steps = [[sample(TWO, 4 + seed), double_batch(seed), sample(TEXT, 5 + seed)] for seed in range(3)]
    assert_steps_equal(eager, graphs, steps, TWO_SEQUENCES)
    assert counts() == (6, 0, {}) and len(layers()._regions) == 1


def test_multi_token_prediction_alone_stays_eager(capsys):
    eager, graphs = pair(mtp_num_layers=1)
    assert_steps_equal(eager, graphs, [samples(MIX, step) for step in range(3)])
    assert counts() == (8, 0, {})
    assert capsys.readouterr().out.count("multi-token prediction runs eager") == 1


def test_layers_are_recomputed_inside_graphs():
    eager, graphs = pair()
    assert_steps_equal(eager, graphs, [samples(MIX)])
    whole = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    vars(graphs.model.language_model.config).update(whole, distribute_saved_activations=False)
    with mock.patch.object(recompute, "checkpoint", wraps=recompute.checkpoint) as checkpoint:
        assert_steps_equal(eager, graphs, [samples(MIX, step) for step in range(1, 3)])
    assert counts() == (8, 0, {}) and checkpoint.called


def test_packs_and_other_arguments_run_eager_and_are_counted():
    _, graphs = pair()
    for step in range(2):
        graphs.step(samples([ONE], step))
    decoder = graphs.model.language_model.decoder
    call = {"hidden_states": torch.zeros(SEQUENCE, 1, HIDDEN), "attention_mask": None}
    with on_cpu(), torch.no_grad():
        decoder(**call)
        decoder(**{**call, "attention_mask": torch.zeros(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)})
    assert counts()[2] == {"other_layout": 1, "call_arguments": 1}


def test_layers_that_no_test_has_seen_stay_eager_and_are_named(caplog):
    eager, graphs = pair()

    class OtherAttention(nn.Identity):
        pass

    graphs.model.language_model.decoder.layers[1].self_attention = OtherAttention()
    LOOPS.bridges_driver([graphs.model], graphs.model.config)
    LOOPS.bridges_driver([graphs.model], graphs.model.config)
    (said,) = [record.message for record in caplog.records if record.name == "bridge_cg_plugin"]
    assert "runs eager" in said and "no graphs of such layers were tried: OtherAttention" in said
    assert not active_graphs()


def test_deactivate_gives_everything_back():
    _, graphs = pair()
    graphs.step(samples(MIX))
    graphs.step(samples(MIX))
    decoder = graphs.model.language_model.decoder
    assert "forward" in vars(decoder)
    before = [p.data_ptr() for p in decoder.parameters()]
    bridge_cg_plugin.deactivate()
    assert not active_graphs() and "forward" not in vars(decoder)
    assert "_deepstack_process" not in vars(decoder)
    assert [p.data_ptr() for p in decoder.parameters()] == before


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
