"""Hugging Face's towers on graphs through the reference executor: outputs and gradients are eager's."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.pixtral import modeling_pixtral as upstream

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.kernels.transformer_engine import _scopes
from bridge_cg_plugin.vision.batch import BatchError

from .hugging_face_towers import (
    OMNI_PATCH,
    SIDE,
    TOLERANCE,
    WINDOW_PATCH,
    assert_equal_results,
    draw_clips,
    draw_images,
    draw_padded,
    draw_windows,
    new_glm45v,
    new_pixtral,
    new_qwen3_omni,
    new_qwen3_omni_audio,
    new_qwen25,
    new_qwen25_omni,
    new_siglip,
    results,
    run_pixtral,
    run_qwen3_omni,
    run_qwen3_omni_audio,
    run_qwen25,
    run_siglip,
)
from .towers import assert_close, graphs_on, loss_of, poison

LEAST_BYTES = 1024

# Rows of grid_thw: windows are squares of 8 x 8 patches, so frames have 1 to 9 of them.
WINDOWED = [
    [[1, 2, 2]],
    [[1, 8, 8]],
    [[1, 10, 8]],
    [[1, 16, 16]],
    [[1, 2, 34], [1, 6, 10]],
    [[3, 6, 10]],
    [[2, 4, 4], [1, 18, 6], [1, 2, 8]],
    [[1, 2, 2]] * 12,
    [[12, 2, 4]],
]
# Encoders that know no video: GLM-4.5V's gets its frames as images.
FRAMES = [[[1, h, w] for t, h, w in rows for _ in range(t)] for rows in WINDOWED]
BUCKETS = (32, 64, 128, 256)
PATCHES = (SIDE // 14) ** 2
COUNTS = [1, 2, 3, 5, 8, 4]
IMAGE_BUCKETS = (PATCHES, 2 * PATCHES, 4 * PATCHES, 8 * PATCHES)


class Case:
    """One encoder with the sizes that it is tried on.

    Attributes:
        options: Buckets small and large.
        largest: One bucket that has room for every size, which takes an eighth of the captures.
        drawn: A strategy of sizes, some too large for graphs.
    """

    def __init__(self, new, run, sizes, options, draw, drawn):
        self.new, self.run, self.sizes, self.options, self.draw = new, run, sizes, options, draw
        self.drawn = drawn
        self.largest = {"buckets": options["buckets"][-1:]}

    def results(self, model, size, seed=0):
        return results(self.run, model, size, seed)


side = st.integers(1, 9).map(lambda n: 2 * n)
videos = st.lists(st.tuples(st.integers(1, 3), side, side).map(list), min_size=1, max_size=4)
frames = videos.map(lambda rows: [[1, h, w] for t, h, w in rows for _ in range(t)])


def patches_case(new, run=run_qwen25, sizes=WINDOWED, width=WINDOW_PATCH, drawn=videos):
    """Return a case of an encoder of images of any size."""
    return Case(new, run, sizes, {"buckets": BUCKETS}, lambda rows: draw_windows(rows, width=width), drawn)


WINDOWS = patches_case(new_qwen25)
GLM = patches_case(new_glm45v, sizes=FRAMES, drawn=frames)
OMNI_WINDOWS = patches_case(new_qwen25_omni)
OMNI = patches_case(new_qwen3_omni, run_qwen3_omni, width=OMNI_PATCH)
IMAGES = Case(
    new_siglip, run_siglip, COUNTS, {"buckets": IMAGE_BUCKETS}, lambda count: (draw_images(count),), st.integers(1, 12)
)
PIXTRALS = Case(new_pixtral, run_pixtral, FRAMES, {"buckets": BUCKETS}, lambda rows: draw_padded(rows), frames)
WITH_GRIDS = {"qwen2.5-vl": WINDOWS, "glm-4.5v": GLM, "qwen2.5-omni": OMNI_WINDOWS, "qwen3-omni": OMNI}
OF_ANY_SIZE = {**WITH_GRIDS, "ministral-3": PIXTRALS}


def cases(found):
    return pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in found.items()])


# Frames of clips: a chunk has 100, a window 400.
CLIPS = [[100], [237], [800], [30, 150], [99, 101, 100], [450, 450], [1300, 1], [120, 7, 8, 9, 330], [400, 399, 401]]
CLIP_BUCKETS = (16, 2 * 16, 4 * 16, 8 * 16, 16 * 16)
clip = st.one_of(st.integers(1, 120), st.integers(1, 900), st.integers(1, 9).map(lambda chunks: 100 * chunks))
clips = st.lists(clip, min_size=1, max_size=5).filter(lambda lengths: max(lengths) >= 100)
AUDIO = Case(new_qwen3_omni_audio, run_qwen3_omni_audio, CLIPS, {"buckets": CLIP_BUCKETS}, draw_clips, clips)
every_encoder = cases({**OF_ANY_SIZE, "siglip": IMAGES, "qwen3-omni-audio": AUDIO})


def test_a_copy_of_a_tower_on_graphs_runs_eager_with_weights_of_its_own():
    model, size = WINDOWS.new(), WINDOWED[0]
    expected = WINDOWS.results(model, size)
    with graphs_on(model, **WINDOWS.options) as graphs:
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for parameter in model.parameters():
            parameter.data.mul_(2.0)
        for copied in copies:
            assert_equal_results(WINDOWS.results(copied, size), expected)
        assert graphs.statistics().replays == 0
        WINDOWS.results(model, size)
        assert graphs.statistics().replays == 1


@every_encoder
def test_any_microbatch_equals_eager(case):
    """The tower is left as it was."""
    model, eager = case.new(), case.new()
    case.results(model, case.sizes[0])  # an eager call may leave hooks
    before = {name: set(vars(module)) for name, module in model.named_modules()}

    def check(size, seed):
        poison(graphs, float("nan"))
        assert_equal_results(case.results(model, size, seed), case.results(eager, size, seed))

    @settings(max_examples=12)
    @given(size=case.drawn, seed=st.integers(0, 9))
    def check_any(size, seed):
        check(size, seed)

    with graphs_on(model, **case.options) as graphs:
        for seed, size in enumerate(case.sizes):
            check(size, seed)
        assert graphs.statistics().replays == len(case.sizes)
        check_any()
        assert set(graphs.statistics().fallbacks) <= {"too_many_tokens"}
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


@cases(OF_ANY_SIZE)
def test_parts_that_an_encoder_calls_otherwise_have_their_usual_names(case):
    assert {"attention", "mlp", "layernorm"} <= {scope for _, scope in _scopes([case.new()])}


def test_activations_of_a_part_leave_the_device():
    model = PIXTRALS.new()
    expected = PIXTRALS.results(model, PIXTRALS.sizes[0])
    with graphs_on(model, offload=("layernorm",), **PIXTRALS.largest) as graphs:
        assert graphs.statistics().pinned_bytes
        assert_equal_results(PIXTRALS.results(model, PIXTRALS.sizes[0]), expected)


@every_encoder
def test_a_frozen_encoder_replays_without_gradients(case):
    model = case.new().requires_grad_(False)
    expected = case.run(model, case.sizes[2])
    with graphs_on(model, **case.largest) as graphs:
        poison(graphs, float("nan"))
        outputs = case.run(model, case.sizes[2])
        assert_close(outputs, expected, TOLERANCE)
        assert not any(o.requires_grad for o in outputs)
        assert graphs.statistics().fallbacks == {} and graphs.statistics().replays == 1


@cases({**WITH_GRIDS, "siglip": IMAGES, "qwen3-omni-audio": AUDIO})
def test_a_call_for_more_than_the_usual_result_runs_eager(case):
    model = case.new()
    size = case.sizes[1]
    given = case.draw(size)
    with graphs_on(model, **case.largest) as graphs:
        assert len(model(*given, output_hidden_states=True).hidden_states) > 1
        assert isinstance(model(*given, return_dict=False), tuple)
        assert graphs.statistics().fallbacks == {"call_arguments": 2}


@cases(WITH_GRIDS)
def test_the_last_hidden_states_are_those_of_eager(case):
    model, given, found = case.new(), case.draw(case.sizes[4]), []
    wanted = [p for p in model.parameters() if p.requires_grad]
    with graphs_on(model, **case.largest) as graphs:
        for pause in (nullcontext, graphs.paused):
            with pause():
                returned = model(*given)
            merged, hidden = returned.pooler_output, returned.last_hidden_state
            gradients = torch.autograd.grad(loss_of([merged, hidden]), wanted, allow_unused=True)
            found.append(
                (list(returned), [returned[0].detach(), merged.detach(), *(g for g in gradients if g is not None)])
            )
        assert graphs.statistics().replays == 1
    assert found[0][0] == found[1][0]
    assert_close(found[0][1], found[1][1])


def test_a_pooling_head_is_part_of_the_region():
    model = new_siglip(head=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "k_proj.bias" not in name  # its gradient is zero but for rounding
    expected = IMAGES.results(model, 3)
    assert len(expected[0]) == 2
    with graphs_on(model, **IMAGES.largest) as graphs:
        poison(graphs, float("nan"))
        assert_equal_results(IMAGES.results(model, 3), expected)
        assert graphs.statistics().fallbacks == {}


@cases({"glm-4.5v": GLM, "ministral-3": PIXTRALS})
def test_dropout_in_attention_is_refused(case):
    model = case.new(attention_dropout=0.1)
    with pytest.raises(OptionError, match=r"attention_dropout=0\.1: it must be 0"), graphs_on(model, **case.largest):
        pass


@every_encoder
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_run_again_in_the_backward(case, reentrant, again):
    model = case.new()
    expected = [case.results(model, size) for size in case.sizes[:3]]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with graphs_on(model, **case.largest) as graphs:
        for size, results in zip(case.sizes, expected, strict=False):
            poison(graphs, float("nan"))
            assert_equal_results(case.results(model, size), results)
        assert graphs.statistics().fallbacks == {}
    assert next(again) > 0


PADDED = [[1, 4, 6], [1, 8, 2]]


def test_calls_of_pixtral_that_do_not_ask_for_hidden_states_run_eager():
    """They come before a replay, and leave hooks on the layers."""
    model = new_pixtral()
    pixels, sizes = draw_padded(PADDED)
    expected = PIXTRALS.results(model, PADDED)
    with graphs_on(model, **PIXTRALS.largest) as graphs:
        assert model(pixels, image_sizes=sizes).hidden_states is None
        assert isinstance(model(pixels, image_sizes=sizes, output_hidden_states=True, return_dict=False), tuple)
        assert graphs.statistics().fallbacks == {"call_arguments": 2}
        assert_equal_results(PIXTRALS.results(model, PADDED), expected)
        assert graphs.statistics().replays == 1


def test_embedded_patches_have_the_type_that_autocast_computes_in():
    model = new_pixtral()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (expected,) = run_pixtral(model, PADDED)
        with graphs_on(model, kernels="exact", **PIXTRALS.largest) as graphs:
            (found,) = run_pixtral(model, PADDED)
            assert graphs.statistics().fallbacks == {}
    assert_close([found], [expected], 1e-4)


@pytest.mark.parametrize("asked", [True, -1], ids=["all", "the last"])
def test_of_a_replays_hidden_states_the_last_can_be_had(asked):
    """What lies beside smaller images is not read. Transformers 5.23 asks for one layer's alone."""
    model = new_pixtral()
    pixels, sizes = draw_padded(PADDED)
    expected = PIXTRALS.results(model, PADDED)
    for image, (height, width) in enumerate(sizes.tolist()):
        pixels[image, :, height:] = pixels[image, :, :, width:] = torch.nan
    with graphs_on(model, **PIXTRALS.largest) as graphs:
        returned = graphs.model(pixels, image_sizes=sizes, output_hidden_states=asked, return_dict=True)
        assert graphs.statistics().fallbacks == {}
        assert_close([returned.hidden_states[-1]], expected[0], TOLERANCE)
        assert returned.hidden_states[-1] is returned.last_hidden_state
        with pytest.raises(OptionError, match="vision_feature_layer=-2: it must be -1"):
            returned.hidden_states[-2]


@pytest.mark.skipif(not hasattr(upstream, "position_ids_in_meshgrid"), reason="a later release has no table")
def test_an_image_behind_the_table_of_positions_is_refused():
    rows = [[1, 20, 20]]
    with pytest.raises(IndexError):
        run_pixtral(new_pixtral(), rows)
    with graphs_on(new_pixtral(), **PIXTRALS.largest) as graphs, pytest.raises(BatchError, match="18 x 18"):
        run_pixtral(graphs.model, rows)
