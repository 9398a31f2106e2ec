"""Experts inside the graph of all layers: their products, and whole models, beside eager's and fp32."""

from itertools import pairwise

import pytest
import torch

from bridge_cg_plugin.language.experts.device import Tables
from bridge_cg_plugin.language.experts.linear import dispatch_linear
from bridge_cg_plugin.language.experts.rows import find_rows
from tests.models import language_model as lm
from tests.models import packed_parity as parity
from tests.models.reference import without_tf32
from tests.models.tower import relative
from tests.routers import take_statistics

from .common import poison
from .packs import Trained, graphs_on

SHAPE = lm.Shape(layers=2, hidden=1024, heads=8, ffn=768, experts=8)
# Each several times, with other tokens: what ties do to one pack is chance.
PACKS = 4 * ((1024,), (300, 400), (1, 900, 20, 800), (60, 500, 200), (1500,), (40,) * 20)
# How much farther from fp32 than eager a product may be, and a model, in which a token whose experts are all but tied
# goes to another one after any rounding.
FARTHER, FARTHER_MODEL = 1.02, 1.05
# Of few packs, where such tokens are few and of chance.
FARTHER_OTHERS, FEW = 1.2, 6
TOKENS, TOP_K, EXPERTS, WIDTH, INNER = 1000, 4, 12, 1024, 1536


def routing(used):
    """Return rows of a batch in which two experts get no token, and one few."""
    generator = torch.Generator("cuda").manual_seed(0)
    scores = torch.rand(TOKENS, EXPERTS, device="cuda", generator=generator)
    scores[:, :2] = -1.0
    scores[7:, 2] = -1.0
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(TOP_K).indices, True)
    return find_rows(routing_map, torch.tensor([used], dtype=torch.int32, device="cuda"), TOP_K)


def drawn(*shape, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).bfloat16()


@pytest.mark.first
def test_products_are_as_near_to_fp32_as_transformer_engines(tower_module):
    from transformer_engine.pytorch import GroupedLinear

    used = 613
    rows = routing(used)
    bounds = rows.bounds.tolist()
    assert bounds[2] == 0 and bounds[-1] == used * TOP_K
    taken = rows.tokens[: bounds[-1]].long()
    theirs = GroupedLinear(EXPERTS, WIDTH, INNER, bias=False, params_dtype=torch.bfloat16)
    weights = [getattr(theirs, f"weight{expert}") for expert in range(EXPERTS)]
    x, gradient = drawn(TOKENS, WIDTH), drawn(bounds[-1], INNER, seed=2)
    padded = torch.full((TOKENS * TOP_K, INNER), torch.nan, device="cuda", dtype=torch.bfloat16)
    padded[: bounds[-1]] = gradient

    leaf = x.clone().requires_grad_()
    out = dispatch_linear(leaf, rows, weights, Tables())
    found = [out[: bounds[-1]], *torch.autograd.grad(out, [leaf, *weights], padded)]

    leaf = x.clone().requires_grad_()
    out = theirs(leaf[taken], [end - first for first, end in pairwise(bounds)])
    eagers = [out, *torch.autograd.grad(out, [leaf, *weights], gradient)]

    exact = [w.detach().float().requires_grad_() for w in weights]
    leaf = x.float().requires_grad_()
    with without_tf32():
        sides = zip(leaf[taken].split([b - a for a, b in pairwise(bounds)]), exact, strict=True)
        out = torch.cat([rows_in @ weight.T for rows_in, weight in sides])
        right = [out, *torch.autograd.grad(out, [leaf, *exact], gradient.float())]
    names = ("output", "input", *(f"weight {expert}" for expert in range(EXPERTS)))
    for name, one, other, truth in zip(names, found, eagers, right, strict=True):
        ours, engines = relative(one, truth), relative(other, truth)
        assert ours <= FARTHER * engines, f"{name}: {ours:.3e} from fp32, Transformer Engine {engines:.3e}"


class Compared:
    """A model of experts, eager and in fp32 with the same weights."""

    def __init__(self, **router):
        with parity.deterministic():
            self.trained = Trained(lm.build_model(SHAPE, **router))
            self.fp32 = parity.Fp32Reference(
                lambda: lm.build_model(SHAPE, dtype=torch.float32, **router), self.trained.model
            )

    def exact(self, pack):
        """Return what fp32 gives, every document by itself."""
        with without_tf32():
            return self.fp32.results(pack)

    def distances_of(self, packs, exact):
        """Return how far steps are from fp32, on average: of the losses, and the mean of all gradients."""
        found = [parity.distances(self.trained.results(pack), right) for pack, right in zip(packs, exact, strict=True)]
        return torch.tensor([[each["losses"], each["mean of gradients"]] for each in found]).mean(0)


@pytest.fixture(scope="module")
def compared(tower_module):
    return Compared()


def test_losses_and_gradients_are_as_near_to_fp32_as_eagers(compared):
    packs = [lm.make_pack(lengths, seed) for seed, lengths in enumerate(PACKS)]
    with parity.deterministic(), graphs_on(compared.trained.model, lm.make_pack((500, 200))) as graphs:
        assert len(graphs._regions) == 1
        exact = [compared.exact(pack) for pack in packs]
        with graphs.paused():
            eagers = compared.distances_of(packs, exact)
        poison(graphs)
        found = compared.distances_of(packs, exact)
        assert graphs.statistics().replays == len(packs), graphs.statistics().fallbacks
    print(f"from fp32, losses and gradients: graphs {found.tolist()}, eager {eagers.tolist()}")
    assert (found <= FARTHER_MODEL * eagers).all(), f"graphs {found.tolist()}, eager {eagers.tolist()} from fp32"


@pytest.mark.first
def test_replays_repeat_to_the_bit(compared):
    pack = lm.make_pack((1, 900, 20, 800))
    with parity.deterministic(), graphs_on(compared.trained.model, lm.make_pack((500, 200))) as graphs:
        first = compared.trained.results(pack)
        poison(graphs)
        second = compared.trained.results(pack)
        assert graphs.statistics().replays == 2, graphs.statistics().fallbacks
    assert parity.same(first, second)


OTHERS = {
    "shared experts": {"moe_shared_expert_intermediate_size": 512},
    "an auxiliary loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2},
    "a bias of experts": {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_other_layers(tower_module, changes):
    compared = Compared(**changes)
    routers = [layer.mlp.router for layer in compared.trained.model.decoder.layers]
    packs = [lm.make_pack(lengths, seed) for seed, lengths in enumerate(PACKS[:FEW])]
    with parity.deterministic(), graphs_on(compared.trained.model, lm.make_pack((500, 200))) as graphs:
        exact = list(map(compared.exact, packs))
        take_statistics(routers)  # the fp32 model logs to the same place
        with graphs.paused():
            eagers, expected = compared.distances_of(packs, exact), take_statistics(routers)
        found, counted = compared.distances_of(packs, exact), take_statistics(routers)
        assert graphs.statistics().replays == FEW, graphs.statistics().fallbacks
    print(f"from fp32, losses and gradients: graphs {found.tolist()}, eager {eagers.tolist()}")
    assert (found <= FARTHER_OTHERS * eagers).all(), f"graphs {found.tolist()}, eager {eagers.tolist()} from fp32"
    # Tokens whose experts are all but tied count elsewhere.
    for one, other in zip(counted, expected, strict=True):
        assert relative(one, other) < 2e-2, f"{one.tolist()} instead of {other.tolist()}"
