from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.vision.plan import MemoryModel


@given(st.floats(0, 1e9), st.floats(1, 1e6), st.floats(0, 1e11))
def test_the_capacity_is_the_largest_within_the_limit(fixed, per_token, limit):
    model = MemoryModel(fixed, per_token)
    tokens = model.tokens_within(limit)
    assert tokens == 0 or fixed + per_token * tokens <= limit * (1 + 1e-9)
    assert fixed + per_token * (tokens + 1) >= limit * (1 - 1e-9)


def test_a_limit_under_the_fixed_part_holds_nothing():
    assert MemoryModel(100.0, 1.0).tokens_within(50.0) == 0
