"""Buckets: their bounds, those that sizes ask for, and which is recorded next."""

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.attention_bounds import Shape, frame_limits, refuse_images, replay_cost, scanned_limits
from bridge_cg_plugin.graphs.buckets import LONGEST_WAIT, TRIED_AGAIN, WINDOW, Bucket, Demand
from bridge_cg_plugin.graphs.fallback import Fallback

from .changes import Rows

EXACT_BELOW = 256


def plain(**settings):
    return Demand(
        **{
            "buckets_of": lambda capacity, _: [Bucket(capacity)],
            "refusal": lambda shape, bucket: None,
            "cost": lambda bucket: bucket.tokens,
            **settings,
        }
    )


def of_images():
    def refuse(shape, bucket):
        return refuse_images(shape, EXACT_BELOW, bucket)

    return Demand(
        buckets_of=lambda capacity, _: [Bucket(capacity, limits) for limits in scanned_limits(capacity, 64)],
        refusal=refuse,
        cost=replay_cost,
        unit=4,
        exact_below=EXACT_BELOW,
    )


def shown(demand, *shapes):
    for shape in shapes:
        demand.saw(Rows(shape) if isinstance(shape, int) else shape)
    return demand


def waits(demand, tokens):
    return demand.missed(Rows(tokens)) is Fallback.NOT_CAPTURED_YET


def test_the_largest_that_saves_most_comes_first_and_nearer_ones_follow_where_they_pay():
    demand = shown(plain(), *[8192] * 8, *[1024] * 8)
    assert demand.begin(1) == [Bucket(8192)]
    assert demand.next() == Bucket(1024)


def test_a_bucket_that_failed_is_not_waited_for():
    shape = Shape(2048, 20, 1024)
    demand = shown(of_images(), *[Shape(4096, 1, 4096)] * 8)
    demand.begin(1)
    shown(demand, *[shape] * 8)
    while bucket := demand.next():
        demand.refuse(bucket)
    assert demand.missed(shape) is Fallback.CAPTURE_FAILED and not demand._lately.missed
    assert demand.missed(Shape(2048, 65, 64)) is Fallback.TOO_MANY_FRAMES
    steps = next(step for step in range(10 * TRIED_AGAIN) if demand.due() and not demand._refused)
    assert steps >= TRIED_AGAIN - 1 and demand.missed(shape) is Fallback.NOT_CAPTURED_YET


def test_it_looks_after_a_miss_and_seldom_otherwise():
    demand = shown(plain(), *[1024] * 3)
    demand.begin(1)
    looks = 0
    for _ in range(10 * LONGEST_WAIT):
        if demand.due():
            looks += 1
            assert demand.next() is None
    assert looks < 20
    assert waits(demand, 2048) and demand.due()


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=WINDOW), st.integers(64, 16_384))
def test_any_sizes_get_buckets_within_the_limit_that_take_them(sizes, limit):
    demand = shown(plain(unit=4, limit=limit), *sizes)
    for bucket in demand.begin(WINDOW):
        assert bucket.tokens <= limit
    assert demand.next() is None
    assert len(set(demand.buckets)) == len(demand.buckets)
    # Each is worth a recording: those that come often are taken.
    often = max(sizes, key=sizes.count)
    assert waits(demand, often) == (often <= limit // 4 * 4)
    if sizes.count(often) > len(sizes) // 2 and waits(demand, often):
        assert any(often <= bucket.tokens for bucket in demand.buckets)


sizes = st.lists(st.integers(1, 3000).map(lambda n: 4 * n), min_size=1, max_size=60)


def accepts(limits, frames, largest):
    return [b for b in limits if frames <= b[0] and largest <= b[1]]


capacities = st.integers(1, 4096).map(lambda n: 4 * n)


def rows_scanned(frames, largest):
    """Return what deterministic kernels scan, which take 32 segments and powers of two at least."""
    return largest if frames == 1 and largest >= 768 else max(frames, 32) * 2 ** (largest - 1).bit_length()


@pytest.mark.parametrize(("limits_of", "cost"), [(frame_limits, rows_scanned), (scanned_limits, operator.mul)])
@given(capacities, st.integers(1, 600))
def test_bounds_are_distinct_cheapest_first_fill_their_capacity_and_the_last_takes_all(limits_of, cost, tokens, most):
    limits = limits_of(tokens, most)
    costs = [cost(*each) for each in limits]
    assert costs == sorted(costs) and len(set(limits)) == len(limits)
    assert all(1 <= frames <= most and 1 <= largest <= tokens <= frames * largest for frames, largest in limits)
    assert accepts(limits[-1:], most, tokens)
    assert limits_of is frame_limits or len(limits) <= (5 if tokens > 1024 else 3)


@given(capacities.filter(lambda n: n > 1024), st.integers(1, 600), st.data())
def test_frames_of_one_size_scan_a_few_rows_a_token(tokens, most, data):
    frames = data.draw(st.integers(1, min(most, 32)))
    found = accepts(scanned_limits(tokens, most), frames, -(-tokens // frames))[0]
    assert found[0] * found[1] <= 4 * tokens + 64 * 32


@given(capacities, st.integers(1, 600), st.data())
def test_a_few_frames_of_any_size_scan_at_most_16_rows_a_token(tokens, most, data):
    frames = data.draw(st.integers(1, min(most, 16 if tokens > 1024 else 8)))
    found = accepts(scanned_limits(tokens, most), frames, tokens)[0]
    assert found[0] * found[1] <= 16 * tokens


@given(capacities, st.integers(1, 600))
def test_deterministic_bounds_stay_under_the_fused_kernels_wall(monkeypatch, tokens, most):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    limits = frame_limits(tokens, most)
    assert limits
    assert all(frames * 16 * largest**2 < 2**30 for frames, largest in limits)
    assert all(frames <= most and largest <= tokens for frames, largest in limits)
    assert accepts(limits, 1, min(tokens, 4096))
