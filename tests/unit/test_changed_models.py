"""A model that changes under its graphs: every microbatch equals eager, on graphs again where the change lasts."""

import pytest

from .changes import Twins


@pytest.mark.parametrize("block", range(10))
def test_any_sequence_of_changes_equals_eager(block):
    replays = fallbacks = 0
    for seed in range(100 * block, 100 * (block + 1)):
        twins = Twins(seed)
        try:
            twins.random_sequence(12)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        statistics = twins.graphs.statistics()
        replays += statistics.replays
        fallbacks += statistics.fallbacks.total()
        twins.close()
    assert replays > fallbacks, "most microbatches should be replayed"
