"""What GPU tests and benchmarks compare graphs with."""

import math

import pytest
import torch

from tests.models import tower
from tests.models.packed_parity import beyond_noise, spread_of, worst_gradient
from tests.models.reference import Fp32Tower
from tests.models.tower import largest_relative
from tests.unit.towers import new_tower


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_is_the_largest_difference(place):
    """`max` forgets a NaN that is not the first number."""
    exact = torch.ones(1), [torch.ones(2), torch.ones(2), torch.ones(2)]
    found = torch.ones(1), [torch.full((2,), torch.nan if i == place else 2.0) for i in range(3)]
    assert math.isnan(largest_relative(found[1], exact[1]))
    assert worst_gradient(found, exact, ["a", "b", "c"]).startswith(f"nan in {'abc'[place]} ")


NAMES = ["large", "small"]


def drawn(count, seed, noise=1e-3, seldom=0.0, shift=0.0):
    """Return results of two gradients with noise: a rare jump of the small one, and a shift of it in all runs."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        large = 1 + noise * torch.randn(64, generator=generator)
        small = torch.ones(4)
        small[0] += seldom * (index == 0) + shift
        found.append((torch.ones(8), [large, small]))
    return found


def spreads_of(**changes):
    return {f"pack {seed}": spread_of(drawn(8, seed), drawn(5, 100 + seed, **changes)) for seed in range(4)}


def test_a_replay_that_jumps_as_an_eager_run_may_is_inside_the_noise():
    spreads = spreads_of(seldom=0.01)
    assert spreads["pack 0"].graphs[0, 2] > 0 and beyond_noise(spreads, NAMES) == []


@pytest.mark.parametrize("wrong", [1e-3, torch.nan])
def test_what_all_replays_of_a_pack_have_is_beyond_the_noise_of_that_gradient(wrong):
    """However much another gradient of eager runs differs."""
    found = beyond_noise({**spreads_of(), "wrong": spread_of(drawn(8, 9), drawn(5, 10, shift=wrong))}, NAMES)
    assert len(found) == 1 and found[0].startswith("wrong: small differs by ")


MIXES = {"image": [(1, 4, 6)], "images": [(1, 4, 4), (1, 2, 6)], "video": [(3, 4, 2), (1, 6, 6)]}


@pytest.mark.parametrize("grid", MIXES.values(), ids=MIXES)
def test_the_reference_is_the_tower(grid):
    model = new_tower()
    batch = tower.make_batch(grid, model)
    outputs, gradients = Fp32Tower(model).step(batch)
    expected = tower.forward(model, batch)
    wanted = torch.autograd.grad(expected, list(model.parameters()), batch.gradients)
    assert tower.largest_relative(outputs, [o.detach() for o in expected]) <= 1e-6
    assert tower.largest_relative(gradients, wanted) <= 1e-5
