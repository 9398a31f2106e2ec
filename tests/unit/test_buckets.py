import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.attention_bounds import frame_limits, scanned_limits
from bridge_cg_plugin.cli.planner.plan import LARGEST_STEP, plan_buckets
from bridge_cg_plugin.graphs.planning.buckets import GRANULARITY

sizes = st.lists(st.integers(1, 3000).map(lambda n: 4 * n), min_size=1, max_size=60)


@given(sizes, st.sampled_from([0, 64, 256, 1000]))
def test_every_observed_size_fits_a_bucket_near_it(observed, exact_below):
    """Capacities ascend in multiples of the merge unit by a bounded factor; small sizes get exactly theirs."""
    found = plan_buckets(observed, exact_below=exact_below)
    assert 0 <= found[-1] - max(observed) < GRANULARITY
    assert list(found) == sorted(set(found)) and all(c % 4 == 0 and c > 0 for c in found)
    assert {s for s in observed if s <= exact_below} <= set(found)
    above = [c for c in found if c > exact_below]
    assert all(
        larger <= smaller * LARGEST_STEP + GRANULARITY for smaller, larger in zip(above, above[1:], strict=False)
    )


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
