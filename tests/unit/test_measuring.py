"""What benchmarks count and draw: the limit of a size, operations, images, kernels and times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.performance.measure import kernels_of, median_times
from tests.models.workloads import (
    COCO_PIXELS,
    COCO_RATIOS,
    coco_microbatches,
    frames_of,
    one_image,
    tokens_of,
)


@pytest.mark.parametrize("tokens", [1 << n for n in range(8, 16)])
def test_one_image_has_the_tokens_and_is_nearly_square(tokens):
    ((frames, height, width),) = one_image(tokens)
    assert (frames, height * width) == (1, tokens)
    assert width in (height, 2 * height) and height % 2 == 0


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


spans = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e5)).map(lambda s: (s[0], s[0] + s[1], "k")), max_size=30)


@given(spans)
def test_busy_time_is_at_most_the_kernels_and_the_span(found):
    busy, total = kernels_of(found).busy_ms, sum(b - a for a, b, _ in found) / 1e3
    whole = (max(b for _, b, _ in found) - min(a for a, _, _ in found)) / 1e3 if found else 0.0
    longest = max((b - a for a, b, _ in found), default=0.0) / 1e3
    assert longest - 1e-6 <= busy <= min(total, whole) + 1e-6


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
