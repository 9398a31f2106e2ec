import gc
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.executor import ReferenceExecutor
from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.helper import (
    VisionTECudaGraphHelper,
    active_helpers,
    get_vision_cuda_graph_seq_length,
    microbatches_in_flight,
)
from bridge_cg_plugin.upstream.qwen3_vl import find_vision_model
from bridge_cg_plugin.vision.batch import BatchError
from bridge_cg_plugin.vision.layers import AttentionPart, MlpPart
from bridge_cg_plugin.vision.qwen3_vl import Qwen3VLEncoder

from .test_gradients import DataParallel
from .towers import DEFAULTS, assert_close, draw, forward, graphs_on, loss_of, new_tower, poison, results

MODULES = [(), ("attn",), ("mlp",)]
ONE_UNIT = [[1, 2, 2]]
IMAGES = [[1, 4, 6], [1, 8, 4], [1, 2, 2]]
VIDEO = [[4, 4, 4]]
MIXED = [[1, 6, 4], [3, 4, 2], [1, 2, 8]]
TINY = [[1, 2, 2]] * 9
EXACT = [[1, 8, 8]]
ONE_OVER = [[1, 8, 8], [1, 2, 2]]
MOST_FRAMES = [[16, 2, 2]]
WHOLE_LARGEST = [[1, 16, 16]]
FITTING = [ONE_UNIT, IMAGES, VIDEO, MIXED, TINY, EXACT, ONE_OVER, MOST_FRAMES, WHOLE_LARGEST]
TOO_MANY_FRAMES = [[17, 2, 2]]
TOO_MANY_TOKENS = [[1, 16, 16], [1, 2, 2]]


def regions(model, modules):
    return len(model.decoder.layers) if modules else 1


@pytest.mark.parametrize("modules", MODULES)
def test_one_capture_replays_every_mix_as_eager(modules):
    model = new_tower()
    expected = [results(model, rows, seed) for seed, rows in enumerate(FITTING)]
    with graphs_on(model, modules=modules) as graphs:
        for seed, rows in enumerate(FITTING):
            outputs, gradients = results(model, rows, seed)
            assert_close(outputs, expected[seed][0])
            assert_close(gradients, expected[seed][1])
        assert graphs.statistics().fallbacks == {}
        assert graphs.statistics().replays == len(FITTING) * regions(model, modules)


@pytest.mark.parametrize("modules", MODULES)
@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_what_static_memory_held_before_changes_nothing(modules, value):
    model = new_tower()
    expected = [results(model, rows, seed) for seed, rows in enumerate(FITTING)]
    with graphs_on(model, modules=modules) as graphs:
        for seed, rows in reversed(list(enumerate(FITTING))):
            poison(graphs, value)
            outputs, gradients = results(model, rows, seed)
            assert_close(outputs, expected[seed][0])
            assert_close(gradients, expected[seed][1])
        assert graphs.statistics().fallbacks == {}


side = st.integers(1, 4).map(lambda n: 2 * n)
batches = st.lists(
    st.lists(st.tuples(st.integers(1, 3), side, side).map(list), min_size=1, max_size=4), min_size=1, max_size=4
)


@settings(max_examples=15)
@given(batches, st.sampled_from(MODULES))
def test_any_sequence_of_microbatches_equals_eager(sequence, modules):
    model = new_tower()
    expected = [results(model, rows, seed) for seed, rows in enumerate(sequence)]
    with graphs_on(model, modules=modules) as graphs:
        for seed, rows in enumerate(sequence):
            poison(graphs, float("nan"))
            outputs, gradients = results(model, rows, seed)
            assert_close(outputs, expected[seed][0])
            assert_close(gradients, expected[seed][1])


@pytest.mark.parametrize("modules", MODULES)
def test_equal_token_counts_with_other_boundaries_are_told_apart(modules):
    model, other = new_tower(), [[2, 4, 8]]
    expected = [results(model, rows) for rows in (EXACT, other)]
    assert not torch.allclose(expected[0][0][0], expected[1][0][0])
    with graphs_on(model, modules=modules):
        for rows, (outputs, gradients) in zip((EXACT, other, EXACT), (*expected, expected[0]), strict=True):
            found = results(model, rows)
            assert_close(found[0], outputs)
            assert_close(found[1], gradients)


@pytest.mark.parametrize("modules", [(), ("attn",)])
def test_more_frames_than_recorded_run_eager(modules):
    model = new_tower()
    expected = results(model, TOO_MANY_FRAMES)
    with graphs_on(model, modules=modules) as graphs:
        found = results(model, TOO_MANY_FRAMES)
        assert graphs.statistics().fallbacks == {"too_many_frames": regions(model, modules)}
        assert graphs.statistics().replays == 0
    assert_close(found[0] + list(found[1]), expected[0] + list(expected[1]), 0.0)


@pytest.mark.parametrize("modules", MODULES)
def test_more_tokens_than_recorded_run_eager(modules):
    model = new_tower()
    expected = results(model, TOO_MANY_TOKENS)
    with graphs_on(model, modules=modules) as graphs:
        found = results(model, TOO_MANY_TOKENS)
        assert graphs.statistics().fallbacks == {"too_many_tokens": regions(model, modules)}
    assert_close(found[0] + list(found[1]), expected[0] + list(expected[1]), 0.0)


@pytest.mark.parametrize("modules", MODULES)
def test_small_microbatches_need_a_bucket_of_their_size(modules):
    model = new_tower()
    cases = [([[1, 4, 8]], True), ([[1, 4, 8], [1, 2, 2]], False), (ONE_UNIT, False), (ONE_OVER, True)]
    with graphs_on(model, modules=modules, buckets=(32, 96, 128), exact_below=64) as graphs:
        for rows, replayed in cases:
            before = graphs.statistics().replays
            forward(model, rows)
            assert (graphs.statistics().replays > before) == replayed
        assert graphs.statistics().fallbacks == {"too_few_tokens": 2 * regions(model, modules)}


@pytest.mark.parametrize("modules", MODULES)
def test_a_frozen_encoder_replays_without_gradients(modules):
    model = new_tower().requires_grad_(False)
    expected = forward(model, IMAGES)
    with graphs_on(model, modules=modules) as graphs:
        poison(graphs, float("nan"))
        outputs = forward(model, IMAGES)
        assert_close(outputs, expected)
        assert not any(o.requires_grad for o in outputs)
        assert graphs.statistics().fallbacks == {}
        assert graphs.statistics().replays == regions(model, modules)


@pytest.mark.parametrize("modules", MODULES)
def test_everything_frozen_but_the_mergers(modules):
    model = new_tower().requires_grad_(False)
    model.merger.requires_grad_(True)
    model.decoder.deepstack_merger_list.requires_grad_(True)
    expected = results(model, MIXED)
    with graphs_on(model, modules=modules) as graphs:
        outputs, gradients = results(model, MIXED)
        assert_close(outputs, expected[0])
        assert_close(gradients, expected[1])
        assert graphs.statistics().fallbacks == {}


@pytest.mark.parametrize("modules", MODULES)
def test_patches_frozen_and_layers_trained(modules):
    model = new_tower()
    model.patch_embed.requires_grad_(False)
    model.pos_embed.requires_grad_(False)
    expected = results(model, MIXED)
    with graphs_on(model, modules=modules):
        outputs, gradients = results(model, MIXED)
    assert_close(outputs, expected[0])
    assert_close(gradients, expected[1])


def test_auto_buckets_come_from_warm_up():
    model = new_tower()
    with graphs_on(model, capture=False, buckets="auto", max_frames="auto") as graphs:
        seen = [IMAGES, WHOLE_LARGEST, MIXED]
        for rows in seen:
            forward(model, rows)
        assert graphs.statistics().replays == 0
        assert graphs.capture()
        assert graphs.plan.observed == len(seen)
        assert graphs.plan.capacities[-1] == 256
        expected = results(model, IMAGES)
        for rows in seen:
            forward(model, rows)
        assert graphs.statistics().replays == 1 + len(seen)
        assert graphs.statistics().warmup_microbatches == len(seen)
        assert_close(results(model, IMAGES)[1], expected[1])


def test_auto_buckets_hold_small_warm_up_sizes_exactly():
    model = new_tower()
    with graphs_on(model, capture=False, buckets="auto", exact_below=64) as graphs:
        for rows in (ONE_UNIT, IMAGES, WHOLE_LARGEST):
            forward(model, rows)
        graphs.capture()
        assert {4, 60, 256} <= set(graphs.plan.capacities)


def test_max_seq_length_is_the_largest_bucket():
    with graphs_on(new_tower(), buckets=(32, 64), max_seq_length=128) as graphs:
        assert graphs.plan.capacities == (32, 64, 128)
    with graphs_on(new_tower(), buckets="auto", max_seq_length=128) as graphs:
        assert graphs.plan.capacities[-1] == 128


def test_frames_seen_in_warm_up_raise_the_frame_bound():
    model = new_tower()
    with graphs_on(model, capture=False, max_frames="auto") as graphs:
        forward(model, [[50, 2, 2]])
        graphs.capture()
        forward(model, [[63, 2, 2]])
        assert graphs.statistics().fallbacks == {}


@pytest.mark.parametrize("modules", MODULES)
def test_evaluation_equals_eager_and_is_counted(modules):
    model = new_tower()
    model.eval()
    with torch.no_grad():
        expected = forward(model, MIXED)
        with graphs_on(model, modules=modules) as graphs:
            poison(graphs, float("nan"))
            outputs = forward(model, MIXED)
            counts = graphs.statistics().buckets.values()
    assert_close(outputs, expected)
    assert sum(c.evaluations for c in counts) == regions(model, modules)
    assert sum(c.replays for c in counts) == 0


def test_training_after_evaluation():
    model = new_tower()
    expected = results(model, MIXED)
    with graphs_on(model) as graphs:
        results(model, IMAGES)
        model.eval()
        with torch.no_grad():
            forward(model, IMAGES)
        model.train()
        found = results(model, MIXED)
        assert graphs.statistics().fallbacks == {}
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])


def test_evaluation_can_be_left_eager():
    model = new_tower()
    with graphs_on(model, evaluation=False) as graphs, torch.no_grad():
        model.eval()
        forward(model, MIXED)
        assert graphs.statistics().fallbacks == {"evaluation_not_captured": 1}


def test_text_only_steps_need_no_call():
    model = new_tower()
    expected = results(model, IMAGES)
    with graphs_on(model, check_interval=1, check_tolerance=1e-3, check_action="stop") as graphs:
        for step in range(6):
            graphs.begin_step()
            if step % 2:
                assert_close(results(model, IMAGES)[1], expected[1])
        assert graphs.statistics().replays == 3
        assert len(graphs.checks) == 3


def test_microbatches_in_flight_up_to_the_slots():
    model = new_tower()
    expected = [results(model, rows, i)[1] for i, rows in enumerate((IMAGES, MIXED, VIDEO))]
    wanted = list(model.parameters())
    with graphs_on(model, slots=2) as graphs:
        losses = [loss_of(forward(model, rows, i)) for i, rows in enumerate((IMAGES, MIXED, VIDEO))]
        assert graphs.statistics().fallbacks == {"no_free_slot": 1}
        for loss, gradients in zip(losses, expected, strict=True):
            assert_close(torch.autograd.grad(loss, wanted), gradients)
        assert graphs._regions[0].free_slots() == 2


def test_slots_follow_the_pipeline_unless_given():
    model, options = new_tower(), {**DEFAULTS, "slots": "auto"}
    model.config.pipeline_model_parallel_size = 4
    for given_slots, microbatches, expected in [("auto", 8, 4), ("auto", 2, 2), (3, 8, 3)]:
        helper = VisionTECudaGraphHelper(
            model,
            model.config,
            num_microbatches=microbatches,
            options=VisionGraphOptions(**{**options, "slots": given_slots}),
            executor=ReferenceExecutor(),
        )
        assert helper.graphs.slots == expected
        helper.graphs.detach()


@pytest.mark.parametrize(
    "stages, virtual, microbatches, expected",
    [(1, None, 8, 1), (4, None, 8, 4), (4, None, 2, 2), (4, 2, 16, 8), (1, 2, 8, 1), (None, None, 1, 1), (4, 1, 8, 4)],
)
def test_microbatches_of_the_first_stage(stages, virtual, microbatches, expected):
    from types import SimpleNamespace

    config = SimpleNamespace(pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=virtual)
    assert microbatches_in_flight(config, microbatches) == expected


@pytest.mark.parametrize("modules", MODULES)
def test_detach_gives_the_encoder_its_own_forward_back(modules):
    model = new_tower()
    own = model.forward
    expected = results(model, MIXED)
    with graphs_on(model, modules=modules):
        assert model.forward != own
    assert "forward" not in model.__dict__
    assert model.forward == own
    for layer in model.decoder.layers:
        assert not {"_forward_attention", "_forward_mlp"} & set(layer.__dict__)
    found = results(model, MIXED)
    assert_close(found[0] + list(found[1]), expected[0] + list(expected[1]), 0.0)


def test_detach_twice_does_nothing_more():
    with graphs_on(new_tower()) as graphs:
        graphs.detach()
        graphs.detach()
        assert "forward" not in graphs.model.__dict__


def test_a_forward_that_was_on_the_instance_comes_back():
    """Another tool's wrapper, say: it was there before the graphs and is there after them."""
    model = new_tower()
    theirs = model.forward = lambda *args, own=model.forward: own(*args)
    with graphs_on(model):
        forward(model, IMAGES)
    assert model.__dict__.get("forward") is theirs


@pytest.mark.parametrize("modules", MODULES)
def test_state_dict_and_parameters_are_the_same_while_active(modules):
    model = new_tower()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    with graphs_on(model, modules=modules):
        results(model, MIXED)
        assert list(model.state_dict()) == keys
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert all(p.grad is None for p in model.parameters())


def test_weights_loaded_after_capture_are_used():
    model, other = new_tower(0), new_tower(1)
    with graphs_on(model) as graphs:
        model.load_state_dict(other.state_dict())
        found = results(model, MIXED)
        assert graphs.statistics().replays == 1
    expected = results(other, MIXED)
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])


def test_report_names_replays_fallbacks_and_plan():
    model = new_tower()
    with graphs_on(model) as graphs:
        for rows in (IMAGES, IMAGES, TOO_MANY_TOKENS, TOO_MANY_FRAMES):
            forward(model, rows)
            gc.collect()
        text = graphs.report()
    row = next(line for line in text.splitlines() if line.split()[0].startswith("64/16/64"))
    assert row.split()[1] == "2"
    assert "too_many_frames 1" in text and "too_many_tokens 1" in text
    assert "plan: buckets 32, 64, 128, 256 tokens" in text


def test_report_without_fallbacks_says_so():
    with graphs_on(new_tower()) as graphs:
        assert "eager fallbacks: none" in graphs.report()


def test_metrics_tags_and_values():
    model = new_tower()
    with graphs_on(model) as graphs:
        results(model, EXACT)
        results(model, [[1, 8, 6]])
        results(model, TOO_MANY_TOKENS)
        found = graphs.metrics()
    assert found["vision_cuda_graph/replays"] == 2
    assert found["vision_cuda_graph/fallbacks"] == 1
    assert found["vision_cuda_graph/fallback/too_many_tokens"] == 1
    assert found["vision_cuda_graph/replayed_share"] == pytest.approx(2 / 3)
    assert found["vision_cuda_graph/padding_share"] == pytest.approx(16 / 128)
    assert found["vision_cuda_graph/memory_gb"] > 0
    assert all(isinstance(v, float) and tag.startswith("vision_cuda_graph/") for tag, v in found.items())


def test_metrics_before_capture_are_zero():
    with graphs_on(new_tower(), capture=False) as graphs:
        assert set(graphs.metrics().values()) == {0.0}


@pytest.mark.parametrize("modules", MODULES)
def test_paused_runs_eager_and_keeps_the_graphs(modules):
    model = new_tower()
    with graphs_on(model, modules=modules) as graphs:
        with graphs.paused():
            forward(model, IMAGES)
            assert graphs.statistics().replays == 0
        forward(model, IMAGES)
        assert graphs.statistics().replays == regions(model, modules)


def test_paused_ends_with_an_error_inside():
    with graphs_on(new_tower()) as graphs:
        with pytest.raises(KeyError), graphs.paused():
            raise KeyError
        forward(graphs.model, IMAGES)
        assert graphs.statistics().replays == 1


def test_paused_inside_paused():
    with graphs_on(new_tower()) as graphs:
        with graphs.paused():
            with graphs.paused():
                forward(graphs.model, IMAGES)
            forward(graphs.model, IMAGES)
            assert graphs.statistics().replays == 0
        forward(graphs.model, IMAGES)
        assert graphs.statistics().replays == 1


def test_detach_while_paused_stays_detached():
    with graphs_on(new_tower()) as graphs:
        with graphs.paused():
            graphs.detach()
        assert "forward" not in graphs.model.__dict__


@pytest.mark.parametrize("rows, match", [([[1, 3, 2]], "multiples"), ([[1, 0, 2]], "at least 1")])
@pytest.mark.parametrize("capture", [False, True])
def test_impossible_grids_are_refused(rows, match, capture):
    model = new_tower()
    with graphs_on(model, capture=capture), pytest.raises(BatchError, match=match):
        model(torch.zeros(4, 1536), torch.tensor(rows))


def test_patches_of_other_images_are_refused():
    model = new_tower()
    with graphs_on(model), pytest.raises(BatchError, match="different images"):
        model(draw(IMAGES)[0], torch.tensor(MIXED))


def test_recapture_replays_the_new_graphs():
    model = new_tower()
    expected = results(model, MIXED)
    with graphs_on(model, modules=("attn",)) as graphs:
        first = graphs._regions
        assert graphs.capture()
        assert all(not r.captured for r in first)
        found = results(model, MIXED)
        assert_close(found[1], expected[1])
        assert graphs.statistics().replays == regions(model, ("attn",))


# Failed captures.


def capture_failing(monkeypatch, error, program=Qwen3VLEncoder):
    def fail(*unused):
        raise error

    monkeypatch.setattr(program, "forward", fail)


@pytest.mark.parametrize(
    "error",
    [
        CaptureError("made to fail"),
        RuntimeError("made to fail"),
        torch.OutOfMemoryError("made to fail"),
        TypeError("made to fail"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_a_failed_capture_goes_on_eager_with_one_warning(monkeypatch, caplog, error):
    model = new_tower()
    expected = results(model, MIXED)
    with graphs_on(model, capture=False, strict=False) as graphs:
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "bridge_cg_plugin"):
            capture_failing(patched, error)
            assert graphs.capture() is False
        warnings = [r for r in caplog.records if r.name == "bridge_cg_plugin"]
        assert len(warnings) == 1 and "made to fail" in warnings[0].getMessage()
        assert not graphs.captured
        caplog.clear()
        found = results(model, MIXED)
        assert not [r for r in caplog.records if r.name == "bridge_cg_plugin"]
        assert "made to fail" in graphs.report()
    assert_close(found[0] + list(found[1]), expected[0] + list(expected[1]), 0.0)


@pytest.mark.parametrize("modules, program", [(("attn",), AttentionPart), (("mlp",), MlpPart)])
def test_a_failed_capture_of_layers_leaves_them_alone(monkeypatch, modules, program):
    model = new_tower()
    with graphs_on(model, capture=False, strict=False, modules=modules) as graphs:
        capture_failing(monkeypatch, CaptureError("made to fail"), program)
        assert graphs.capture() is False
        for layer in model.decoder.layers:
            assert not {"_forward_attention", "_forward_mlp"} & set(layer.__dict__)
        results(model, MIXED)


def test_eager_microbatches_after_a_failed_capture_are_fallbacks_not_warm_up(monkeypatch):
    model = new_tower()
    with graphs_on(model, capture=False, strict=False) as graphs:
        forward(model, IMAGES)
        capture_failing(monkeypatch, CaptureError("made to fail"))
        graphs.capture()
        for _ in range(3):
            forward(model, IMAGES)
        assert graphs.statistics().warmup_microbatches == 1
        assert sum(graphs.statistics().fallbacks.values()) == 3


def test_strict_stops_on_a_failed_capture(monkeypatch):
    model = new_tower()
    with graphs_on(model, capture=False, strict=True) as graphs:
        capture_failing(monkeypatch, CaptureError("made to fail"))
        with pytest.raises(CaptureError, match="made to fail"):
            graphs.capture()
        assert not graphs.captured


def test_nothing_to_plan_from_is_a_failed_capture(caplog):
    with graphs_on(new_tower(), capture=False, strict=False, buckets="auto") as graphs:
        with caplog.at_level(logging.WARNING, "bridge_cg_plugin"):
            assert graphs.capture() is False
        assert "no vision microbatch was seen" in caplog.text
    with (
        graphs_on(new_tower(), capture=False, strict=True, buckets="auto") as graphs,
        pytest.raises(CaptureError, match="no vision microbatch was seen"),
    ):
        graphs.capture()


def test_memory_that_runs_out_while_planning_is_a_failed_capture(monkeypatch):
    model = new_tower()
    with graphs_on(model, capture=False, strict=False, buckets="auto") as graphs:
        forward(model, IMAGES)

        def fail():
            raise torch.OutOfMemoryError("made to fail")

        monkeypatch.setattr(graphs, "_capacity_limit", fail)
        assert graphs.capture() is False
        assert "made to fail" in graphs.report()


def test_a_capture_after_a_failed_one(monkeypatch):
    model = new_tower()
    with graphs_on(model, capture=False, strict=False) as graphs:
        with monkeypatch.context() as patched:
            capture_failing(patched, CaptureError("made to fail"))
            graphs.capture()
        assert graphs.capture() and graphs.failure is None
        forward(model, IMAGES)
        assert graphs.statistics().replays == 1


# The helper and finding the encoder.


class Holder(nn.Module):
    def __init__(self, name, inner, config=None):
        super().__init__()
        setattr(self, name, inner)
        if config is not None:
            self.config = config


def test_a_model_without_an_encoder_is_left_alone():
    for model in (nn.Linear(2, 2), [nn.Linear(2, 2)], Holder("module", nn.Linear(2, 2)), []):
        before = len(active_helpers())
        helper = VisionTECudaGraphHelper(model, new_tower().config, 64, 1, 2)
        helper.create_cudagraphs()
        assert helper.graphs_created() is False
        helper.cuda_graph_set_manual_hooks()
        helper.delete_cuda_graphs()
        helper.delete_cuda_graphs()
        assert len(active_helpers()) == before


def test_the_encoder_is_found_under_any_wrapper():
    tower = new_tower()
    holder = Holder("vision_model", tower)
    deeper = Holder("model", holder)
    for model, expected in [
        (tower, tower),
        (holder, holder),
        (deeper, holder),
        (Holder("module", holder), holder),
        (Holder("module", Holder("module", deeper)), holder),
        (Holder("module", tower), tower),
        ([nn.Linear(2, 2), Holder("module", deeper)], holder),
    ]:
        assert find_vision_model(model) == (tower, expected)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Holder("vision_model", None), Holder("module", nn.Linear(2, 2))])
def test_no_encoder_is_found_where_there_is_none(model):
    assert find_vision_model(model) is None


@pytest.mark.parametrize("with_config", [True, False])
def test_a_helper_on_wrapped_chunks(with_config):
    tower = new_tower()
    chunk = Holder("module", Holder("vision_model", tower, tower.config if with_config else None))
    expected = results(tower, MIXED)
    helper = VisionTECudaGraphHelper(
        [chunk], tower.config, options=VisionGraphOptions(**DEFAULTS), executor=ReferenceExecutor()
    )
    helper.create_cudagraphs()
    assert helper in active_helpers()
    assert_close(results(tower, MIXED)[1], expected[1])
    assert helper.graphs.statistics().replays == 1
    helper.delete_cuda_graphs()
    assert helper not in active_helpers()
    assert not helper.graphs_created()
    assert "forward" not in tower.__dict__


def test_a_helper_reads_the_options_of_the_models_provider():
    tower = new_tower()
    for name, value in {
        "vision_cuda_graph_impl": "transformer_engine",
        "vision_cuda_graph_buckets": [32, 64],
        "vision_cuda_graph_scope": ["mlp"],
    }.items():
        setattr(tower.config, name, value)
    helper = VisionTECudaGraphHelper(tower, tower.config)
    assert helper.options.buckets == (32, 64) and helper.options.modules == ("mlp",)
    helper.create_cudagraphs()
    assert helper.graphs_created()
    helper.delete_cuda_graphs()


def test_deleting_prints_the_report(capsys):
    model = new_tower()
    helper = VisionTECudaGraphHelper(
        model, model.config, options=VisionGraphOptions(**DEFAULTS), executor=ReferenceExecutor()
    )
    helper.create_cudagraphs()
    capsys.readouterr()
    helper.delete_cuda_graphs()
    printed = capsys.readouterr().out
    assert "eager fallbacks: none" in printed
    assert all(line.startswith("[bridge-cg] ") for line in printed.splitlines())


def test_the_seq_length_for_upstreams_log_line():
    from types import SimpleNamespace

    assert get_vision_cuda_graph_seq_length(SimpleNamespace(max_vision_cuda_graph_seq_length=512)) == 512
    assert get_vision_cuda_graph_seq_length(SimpleNamespace(num_position_embeddings=256)) == 256
    assert get_vision_cuda_graph_seq_length(SimpleNamespace(), 77) == 77


# Eager passes beside replays, under data parallelism's `main_grad`.


def accumulate(model, passes):
    """Sum the losses of forward passes and run one backward; returns every `main_grad`."""
    sum(loss_of(run()) for run in passes).backward()
    return [p.main_grad for p in model.parameters()]


def test_an_eager_fallback_and_a_replay_in_one_backward():
    model, twin = new_tower(), new_tower()
    sides = [DataParallel(m) for m in (model, twin)]
    expected = accumulate(twin, [lambda rows=rows: forward(twin, rows) for rows in (TOO_MANY_FRAMES, IMAGES)])
    with graphs_on(model) as graphs:
        passes = [lambda rows=rows: forward(model, rows) for rows in (TOO_MANY_FRAMES, IMAGES)]
        assert_close(accumulate(model, passes), expected)
        assert graphs.statistics().replays == 1
    assert all(side.arrived for side in sides)


@pytest.mark.parametrize("kind", ["paused", "before capture", "with block arguments"])
def test_every_eager_pass_adds_its_gradient_beside_a_replay_in_one_backward(kind):
    model, twin = new_tower(), new_tower()
    sides = [DataParallel(m) for m in (model, twin)]
    expected = accumulate(twin, [lambda: forward(twin, MIXED), lambda: forward(twin, IMAGES)])
    with graphs_on(model, capture=kind != "before capture") as graphs:
        if kind == "paused":
            with graphs.paused():
                eager = forward(model, MIXED)
        elif kind == "before capture":
            eager = forward(model, MIXED)
            graphs.capture()
        else:
            hidden, deepstack = model(*draw(MIXED), extra_block_kwargs={"attention_bias": None})
            eager = [hidden, *deepstack]
        found = accumulate(model, [lambda: eager, lambda: forward(model, IMAGES)])
        assert graphs.statistics().replays == 1
    assert_close(found, expected)
    assert all(side.arrived for side in sides)


def test_a_call_that_graphs_cannot_take_is_counted():
    model = new_tower()
    with graphs_on(model) as graphs:
        model(*draw(MIXED), extra_block_kwargs={"attention_bias": None})
        assert sum(graphs.statistics().fallbacks.values()) == 1


def test_the_report_counts_buckets_that_were_not_used():
    model = new_tower()
    with graphs_on(model) as graphs:
        assert "buckets not used: 4" in graphs.report()
        forward(model, IMAGES)
        assert "buckets not used: 3" in graphs.report()


# Memory limits and several helpers.


def largest_within(model, gigabytes):
    """Return the largest capacity captured within the limit, and the memory that took in GiB."""
    with graphs_on(model, capture=False, buckets="auto", memory_gb=gigabytes) as graphs:
        for rows in FITTING:
            forward(model, rows)
        graphs.capture()
        return graphs.plan.capacities[-1], graphs.statistics().memory_bytes / 2**30


def test_a_memory_limit_shrinks_the_largest_bucket_until_it_holds():
    model = new_tower()
    free, used = largest_within(model, 1.0)
    assert free == 256
    limit = used * 0.6
    shrunk, used = largest_within(model, limit)
    assert 0 < shrunk < free and used <= limit


def test_a_memory_limit_that_nothing_fits_is_a_failed_capture():
    with pytest.raises(CaptureError, match="memory_gb"):
        largest_within(new_tower(), 1e-9)


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_helpers_on_one_encoder_leave_it_as_it_was(first_out):
    """A training run that ended with an error leaves its helper behind; the next run makes another."""
    model = new_tower()
    expected = results(model, MIXED)
    made = [
        VisionTECudaGraphHelper(
            model, model.config, options=VisionGraphOptions(**DEFAULTS), executor=ReferenceExecutor()
        )
        for _ in range(2)
    ]
    made[1].create_cudagraphs()
    forward(model, IMAGES)
    assert made[1].graphs.statistics().replays == 1
    made[first_out].delete_cuda_graphs()
    made[1 - first_out].delete_cuda_graphs()
    assert "forward" not in model.__dict__
    assert_close(results(model, MIXED)[0], expected[0], 0.0)
