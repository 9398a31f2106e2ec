"""Packed documents on graphs with default algorithms: attention's and Mamba's backwards add up in any order.

So eager differs from itself, in few packs and by little; what it differs by is measured over all packs together. A sum
on the edge between two values of bf16 becomes, added up in another order, the neighbour of what it was: in gradients of
few elements, as a mixer has them for its heads, one such element counts. Another process on the GPU changes the order,
for as long as it computes: graphs would be compared with eager of a quiet moment.
"""

from contextlib import nullcontext

import pytest

from tests.models import language_model as lm
from tests.models.tilings import few_tilings

from .packs import Trained, assert_within_noise, graphs_on, thirty_packs
from .test_packed import SIZES
from .test_packed_mamba import SHAPE, needs_mamba


@pytest.mark.alone
@pytest.mark.parametrize(
    "shape", [lm.Shape(**SIZES), pytest.param(SHAPE, marks=needs_mamba)], ids=["attention", "mamba"]
)
def test_graphs_differ_from_eager_as_eager_does_from_itself(tower_module, shape):
    with few_tilings() if shape.pattern else nullcontext():
        trained = Trained(lm.build_model(shape))
        with graphs_on(trained.model, lm.make_pack((500, 200))) as graphs:
            assert_within_noise(trained, graphs, thirty_packs())
