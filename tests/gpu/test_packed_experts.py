"""Packed documents on real graphs of a mixture of experts: attention and the router, experts eager.

Experts' results are added up in any order, and after a rounding a token whose experts are all but tied goes to another.
So eager and graphs run with deterministic algorithms, and are compared as all others are.
"""

import pytest
import torch

from tests.models import language_model as lm
from tests.models import packed_parity as parity

from .packs import Trained, assert_eagers, graphs_on

BOTH = pytest.param(("attn", "moe_router"), marks=pytest.mark.first)
PARTS = pytest.mark.parametrize("modules", [("attn",), ("moe_router",), BOTH], ids=",".join)
SHAPE = lm.Shape(layers=2, hidden=1024, heads=8, ffn=768, experts=8)


@pytest.fixture(autouse=True)
def deterministic_algorithms():
    with parity.deterministic():
        yield


def assert_replays_are_eagers(modules, **router):
    trained = Trained(lm.build_model(SHAPE, **router))
    with graphs_on(trained.model, lm.make_pack((500, 200)), modules=modules) as graphs:
        assert len(graphs._regions) == 2
        for lengths in ((1024,), (300, 400), (1, 900, 20, 800)):
            assert_eagers(trained, graphs, lm.make_pack(lengths), f"{','.join(modules)}, {lengths}")
        assert not graphs.statistics().fallbacks, graphs.statistics().fallbacks


@PARTS
def test_routers_without_a_loss(tower_module, modules):
    assert_replays_are_eagers(modules)


@PARTS
def test_routers_with_an_auxiliary_loss(tower_module, modules):
    """Only the router's product is recorded; the loss counts real tokens."""
    assert_replays_are_eagers(modules, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2)


def test_an_eager_microbatch_between_replays_routes_for_itself(tower_module):
    trained = Trained(lm.build_model(SHAPE))
    packs = [lm.make_pack(lengths) for lengths in ((1024,), (60, 100), (1024,))]
    modules = ("attn", "moe_router")
    with graphs_on(trained.model, lm.make_pack((500, 200)), modules=modules) as graphs:
        with graphs.paused():
            expected = [trained.results(pack)[0] for pack in packs]
        found = [trained.results(pack)[0] for pack in packs]
        assert graphs.statistics().fallbacks == {"too_few_tokens": 1}, graphs.statistics().fallbacks
    assert torch.equal(found[1], expected[1]), (found[1] - expected[1]).abs().max().item()
    assert torch.equal(found[0], found[2]), (found[0] - found[2]).abs().max().item()
