"""What benchmarks count and draw: the limit of a size, operations, images, kernels and times."""

from hypothesis import given
from hypothesis import strategies as st

from scripts.performance.measure import kernels_of
from tests.models.workloads import (
    coco_microbatches,
    frames_of,
    tokens_of,
)


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 1000))
def test_a_seed_draws_the_same_microbatches_again(count, most, seed):
    drawn = coco_microbatches(count, most, seed)
    assert drawn == coco_microbatches(count, most, seed)
    assert len(drawn) == count and all(1 <= len(grid) <= most for grid in drawn)
    assert all(tokens_of(grid) % 4 == 0 and frames_of(grid) == len(grid) for grid in drawn)


spans = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e5)).map(lambda s: (s[0], s[0] + s[1], "k")), max_size=30)


@given(spans)
def test_busy_time_is_at_most_the_kernels_and_the_span(found):
    busy, total = kernels_of(found).busy_ms, sum(b - a for a, b, _ in found) / 1e3
    whole = (max(b for _, b, _ in found) - min(a for a, _, _ in found)) / 1e3 if found else 0.0
    longest = max((b - a for a, b, _ in found), default=0.0) / 1e3
    assert longest - 1e-6 <= busy <= min(total, whole) + 1e-6
