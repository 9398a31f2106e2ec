"""A packed hybrid with the stack and the mixer of the installed release."""

from dataclasses import fields

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from ..unit.hybrids import hybrid_pack, new_hybrid, stand_ins
from ..unit.packs import graphs_on, losses_and_gradients
from ..unit.towers import assert_close

PACK = hybrid_pack((30, 180, 77))
# Older releases know the modules by another name.
(MODULES,) = [f.name for f in fields(TransformerConfig) if f.name == "cuda_graph_modules"] or ["cuda_graph_scope"]


@pytest.fixture(autouse=True)
def kernels():
    with stand_ins():
        yield


@pytest.mark.parametrize("modules", [[], ["mamba"]], ids=["all layers", "mamba"])
def test_a_hybrid_of_this_release_replays(active, modules):
    model = new_hybrid()
    expected = losses_and_gradients(model, PACK)
    with graphs_on(model, PACK, **{MODULES: modules}) as graphs:
        found = losses_and_gradients(model, PACK)
        assert graphs.statistics().replays == len(graphs._regions) == (2 if modules else 1)
    assert_close([found[0], *found[1]], [expected[0], *expected[1]])
