"""Packed documents on graphs with default algorithms: attention's backward adds up in an order that timing decides.

So eager differs from itself, in few packs and by little; what it differs by is measured over all packs together.
"""

from scripts.performance import language_model as lm

from .packs import Trained, assert_within_noise
from .test_packed import SIZES


def test_graphs_differ_from_eager_as_eager_does_from_itself(tower_module):
    assert_within_noise(Trained(lm.build_model(lm.Shape(**SIZES))))
