"""What benchmarks count and draw: the limit of a size, operations, images, kernels and times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.performance.measuring.measure import family, kernels_of, median_times, overlap_us
from scripts.performance.models.arithmetic import (
    TFLOPS,
    LanguageModelShape,
    TowerShape,
    Trained,
    language_model_flops,
    limit_ms,
    shape_of,
    step_flops,
)
from scripts.performance.models.workloads import (
    CASES,
    COCO_PIXELS,
    COCO_RATIOS,
    SWEEP,
    coco_microbatches,
    frames_of,
    one_image,
    tokens_of,
    workloads,
)

from .towers import tower


def test_the_limit_is_the_published_one():
    """Figures that were computed on their own, by hand, for an earlier study."""
    expected = {"1x448": 3.4, "1x768": 12, "4x448": 14, "8mix": 32, "video16": 26, "1x2048": 230}
    assert {name: limit_ms(grid) for name, grid in CASES.items()} == pytest.approx(expected, rel=0.03)


rows = st.tuples(st.integers(1, 4), st.integers(1, 40).map(lambda n: 2 * n), st.integers(1, 40).map(lambda n: 2 * n))
grids = st.lists(rows, min_size=1, max_size=5)


@given(grids, grids)
def test_images_cost_what_they_cost_alone(one, other):
    assert step_flops([*one, *other]) == pytest.approx(step_flops(one) + step_flops(other))


@given(st.integers(1, 8), st.integers(1, 30).map(lambda n: 2 * n))
def test_one_large_frame_costs_more_than_as_many_tokens_in_small_ones(frames, side):
    large, small = step_flops([(1, side, side * frames)]), step_flops([(frames, side, side)])
    assert large >= small and (large > small) == (frames > 1)


def test_the_limit_grows_with_the_tower():
    grid = CASES["1x448"]
    assert limit_ms(grid) == pytest.approx(step_flops(grid) / TFLOPS / 1e9)
    assert step_flops(grid, TowerShape(layers=54)) > 1.8 * step_flops(grid)


QWEN3_8B = LanguageModelShape(layers=36, hidden=4096, queries=4096, keys=1024, mlp=12288, vocabulary=151_936)


def test_a_token_costs_six_operations_a_weight_but_for_attention():
    """Qwen3-8B's published count without embeddings is 6.95e9; the output layer has 0.62e9 more."""
    assert language_model_flops([1], QWEN3_8B) == pytest.approx(6 * (6.95e9 + 0.62e9), rel=5e-3)


def test_causal_attention_grows_with_the_square_of_a_document():
    linear = language_model_flops([1], QWEN3_8B) * 4096
    apart = language_model_flops([1024] * 4, QWEN3_8B) - linear
    assert language_model_flops([4096], QWEN3_8B) - linear == pytest.approx(4 * apart, rel=1e-2)
    assert language_model_flops([4096], QWEN3_8B) - linear == pytest.approx(3.5 * 36 * 2 * 4096**2 * 4096, rel=1e-2)


def test_frozen_weights_have_no_product_of_their_own_gradient():
    grid, frozen = CASES["1x448"], Trained(weights=False)
    assert language_model_flops([1], QWEN3_8B, frozen) == pytest.approx(
        2 / 3 * language_model_flops([1], QWEN3_8B), 1e-3
    )
    forward = step_flops(grid, trained=Trained(weights=False, inputs=False))
    assert forward < step_flops(grid, trained=frozen) < step_flops(grid) < 3.2 * forward


def test_a_models_own_sizes_are_read():
    shape = shape_of(tower())
    assert (shape.layers, shape.hidden, shape.mlp, shape.mergers, shape.out) == (3, 32, 64, 3, 24)
    assert (shape.patch, shape.merged) == (1536, 4)


@pytest.mark.parametrize("tokens", SWEEP)
def test_one_image_has_the_tokens_and_is_nearly_square(tokens):
    ((frames, height, width),) = one_image(tokens)
    assert (frames, height * width) == (1, tokens)
    assert width in (height, 2 * height) and height % 2 == 0


def test_a_size_that_is_a_case_is_measured_once():
    found = workloads(CASES, SWEEP)
    assert "tokens_16384" not in found and len(found) == len(CASES) + len(SWEEP) - 1
    assert "tokens_16384" in workloads([], SWEEP)


@pytest.mark.parametrize(
    "cases, tokens, said",
    [(["2x448"], [], "--cases 2x448: it must"), ([], [300], "--tokens 300: it must"), ([], [2], "--tokens 2")],
)
def test_unknown_cases_are_refused(cases, tokens, said):
    with pytest.raises(ValueError, match=said):
        workloads(cases, tokens)


def test_drawn_images_have_the_published_distribution():
    images = [row for grid in coco_microbatches(1500) for row in grid]
    assert all(t == 1 and h % 2 == 0 and w % 2 == 0 and max(h, w) <= 40 for t, h, w in images)
    pixels = sorted(h * w * 256 for _, h, w in images)
    ratios = sorted(h / w for _, h, w in images)
    # Sides are rounded to 32 pixels and the longer one is cut at 640, so the quantiles move a little.
    for values, (low, high) in ((pixels, COCO_PIXELS), (ratios, COCO_RATIOS)):
        assert values[len(values) // 20] == pytest.approx(low, rel=0.12)
        assert values[-len(values) // 20] == pytest.approx(high, rel=0.12)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 1000))
def test_a_seed_draws_the_same_microbatches_again(count, most, seed):
    drawn = coco_microbatches(count, most, seed)
    assert drawn == coco_microbatches(count, most, seed)
    assert len(drawn) == count and all(1 <= len(grid) <= most for grid in drawn)
    assert all(tokens_of(grid) % 4 == 0 and frames_of(grid) == len(grid) for grid in drawn)


def test_kernels_that_overlap_are_busy_once():
    found = kernels_of([(0, 1000, "gemm"), (500, 1500, "gemm"), (2000, 3000, "Memcpy DtoD")])
    assert (found.count, found.busy_ms) == (3, pytest.approx(2.5))
    assert found.by_name == {"gemm": (pytest.approx(2.0), 2), "Memcpy DtoD": (pytest.approx(1.0), 1)}
    assert found.families() == {"matrix products": pytest.approx(2.0), "copies": pytest.approx(1.0)}
    assert found.largest(1) == [("gemm", pytest.approx(2.0), 2)]


spans = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e5)).map(lambda s: (s[0], s[0] + s[1], "k")), max_size=30)


@given(spans)
def test_busy_time_is_at_most_the_kernels_and_the_span(found):
    busy, total = kernels_of(found).busy_ms, sum(b - a for a, b, _ in found) / 1e3
    whole = (max(b for _, b, _ in found) - min(a for a, _, _ in found)) / 1e3 if found else 0.0
    longest = max((b - a for a, b, _ in found), default=0.0) / 1e3
    assert longest - 1e-6 <= busy <= min(total, whole) + 1e-6


@pytest.mark.parametrize(
    "name, expected",
    [
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "matrix products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128>", "attention: dot_do_o"),
        ("void transformer_engine::normalization::ln_bwd_finalize_tuned_kernel<...>", "norms"),
        ("_layernorm_backward", "norms"),
        ("_rotate", "rotary embedding"),
        ("_bias_gelu_backward", "bias and activation"),
        ("_bias_residual", "bias and activation"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("void at::native::multi_tensor_apply_kernel<...>", "gradient accumulation"),
        ("void at::native::reduce_kernel<128, 4, ...>", "reductions"),
        ("_add_partials", "reductions"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "element-wise"),
        ("void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda...>", "copies"),
        ("something_new", "other"),
    ],
)
def test_kernels_have_a_family(name, expected):
    assert family(name) == expected


def test_how_long_copies_ran_beside_kernels():
    assert overlap_us([(0, 10)], [(5, 7), (6, 8), (9, 20)]) == 4
    assert overlap_us([(0, 10), (5, 12)], [(0, 20)]) == 12  # two copies at once are one stretch of time
    assert overlap_us([(0, 1)], []) == overlap_us([], [(0, 1)]) == 0


def test_medians_and_how_many_runs_they_are_of():
    calls = []

    def run(between):
        calls.append(1)
        between()

    times = median_times(run, 7, warmup=2)
    assert len(calls) == 9 and times.repeats == 7
    assert 0 <= times.fwd_ms <= times.ms and times.host_ms >= 0
    assert median_times(run, 1).repeats == 3
    assert median_times(run, 1000, seconds=0.0).repeats == 3
