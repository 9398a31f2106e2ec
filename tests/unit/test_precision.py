"""The fp32 tower that kernels are measured against."""

import pytest
import torch

from tests.models import tower
from tests.models.reference import Fp32Tower
from tests.unit.towers import new_tower

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
