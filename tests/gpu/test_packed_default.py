"""Packed documents on graphs with default algorithms: attention's backward adds up in an order that timing decides.

So eager differs from itself, in few packs and by little; what it differs by is measured over all packs together.
Another process on the GPU changes the order, for as long as it computes: graphs would be compared with eager of a quiet
moment.
"""

import pytest

from tests.models import language_model as lm

from .packs import Trained, assert_differs_as_eager_does
from .test_packed import SIZES


@pytest.mark.alone
def test_graphs_differ_from_eager_as_eager_does_from_itself(tower_module):
    assert_differs_as_eager_does(Trained(lm.build_model(lm.Shape(**SIZES))))
