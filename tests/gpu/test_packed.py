"""Packed documents on real graphs of a GPT model's layers: losses and gradients against eager, to the bit.

Attention's backward adds up in an order that timing decides, so eager and graphs run with deterministic algorithms
here; test_packed_default.py is about the others. Where a pack is padded, eager runs on the bucket's rows too: another
number of rows lets a matrix library choose another kernel, whose rounding is neither better nor worse. What that means
is measured against fp32.
"""

import pytest
import torch

from tests.models import language_model as lm
from tests.models import packed_parity as parity

from .packs import Trained, assert_eagers, assert_packs_with_padding, assert_parts, assert_same, graphs_on, thirty_packs

pytestmark = pytest.mark.usefixtures("deterministic_algorithms")
SIZES = {"layers": 4, "hidden": 1024, "heads": 8, "ffn": 3072}
AUXILIARY = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}
# Graphs may be farther from fp32 than eager on a pack's own rows by this factor: both are a rounding of the same.
FARTHER = 1.1


@pytest.fixture(scope="module", params=[pytest.param(False, id="rope")])
def gpt(request, tower_module):
    with parity.deterministic():  # a fixture of a module comes before those of a test
        made = Trained(lm.build_model(lm.Shape(**SIZES, fused_rope=request.param)))
    assert all(layer.self_attention.core_attention.deterministic for layer in made.model.decoder.layers)
    return made


@pytest.fixture(scope="module")
def fp32(gpt):
    return parity.Fp32Reference(lambda: lm.build_model(lm.Shape(**SIZES), dtype=torch.float32), gpt.model)


@pytest.mark.first
@pytest.mark.parametrize("gpt", [False, True], ids=["rope", "fused-rope"], indirect=True)
def test_thirty_packs_replayed_from_one_capture(gpt, fp32):
    far = {}
    with graphs_on(gpt.model, lm.make_pack((500, 200))) as graphs:
        reads = graphs.workload.host.device_reads
        for name, pack in thirty_packs():
            found = assert_eagers(gpt, graphs, pack, name)
            with graphs.paused():
                own = gpt.results(pack)
            if not parity.same(found, own):
                exact = fp32.results(pack)
                far[name] = parity.distances(found, exact), parity.distances(own, exact)
        assert not graphs.statistics().fallbacks, graphs.statistics().fallbacks
        assert graphs.workload.host.device_reads == reads, (
            f"{graphs.workload.host.device_reads - reads} offsets read from the device"
        )
    assert_as_near_to_fp32(far)


def assert_as_near_to_fp32(far):
    """Where graphs differ from eager on the packs' own rows, neither is the nearer one to fp32.

    The gradient that is farthest is one small norm's of a pack, by chance: it is the farthest of all packs that counts.
    """
    print(f"{len(far)} of 30 packs differ from eager on their own rows")
    for name, (graphs, eager) in far.items():
        print(f"{name}: {', '.join(f'{what} {graphs[what]:.3e} (eager {eager[what]:.3e})' for what in graphs)}")
    for name, (graphs, eager) in far.items():
        for what in ("losses", "mean of gradients"):
            assert graphs[what] <= FARTHER * eager[what], f"{name}: {what} {graphs[what]:.3e}, eager {eager[what]:.3e}"
    if far:
        worst, eagers = (max(found["worst gradient"] for found in side) for side in zip(*far.values(), strict=True))
        assert worst <= FARTHER * eagers, f"worst gradient of all packs {worst:.3e}, eager {eagers:.3e}"


def test_gradients_added_inside_products_are_nearer_to_fp32(gpt, fp32):
    """A step of several microbatches: eager and graphs differ in what they round before they add."""
    packs = [lm.make_pack(lengths, seed) for seed, lengths in enumerate(((1024,), (300, 700), (1, 800, 20, 203)))]

    def step(results):
        """Return the losses of all packs and the sum of their gradients."""
        each = [results(pack) for pack in packs]
        gradients = [sum(many) for many in zip(*(gradients for _, gradients in each), strict=True)]
        return torch.cat([losses.flatten() for losses, _ in each]), gradients

    def accumulated():
        gpt.grads.zero()
        losses = torch.cat([lm.step(gpt.model, pack).flatten() for pack in packs])
        return losses, gpt.grads.copy()

    expected = accumulated()
    found = {}
    for fused in (False, True):
        fusion = {"cuda_graph_packed_gradient_accumulation_fusion": fused}
        with graphs_on(gpt.model, lm.make_pack((500, 200)), **fusion) as graphs:
            found[fused] = accumulated()
            assert graphs.statistics().replays == len(packs), graphs.statistics().fallbacks
    assert_same(found[False], [expected], gpt.names, "not fused")
    assert torch.equal(found[True][0], expected[0])
    exact = step(fp32.results)
    graphs, eager = (parity.distances(result, exact) for result in (found[True], expected))
    print(f"from fp32: graphs {graphs}, eager {eager}")
    assert not parity.same(found[True], expected) and graphs["mean of gradients"] < eager["mean of gradients"]
    assert graphs["worst gradient"] <= FARTHER * eager["worst gradient"]


@pytest.mark.first
def test_parts_of_layers(gpt):
    assert_parts(gpt, ("attn", "mlp"))


def test_documents_with_padding_between_them(gpt):
    assert_packs_with_padding(gpt)


@pytest.mark.first
@pytest.mark.parametrize("router", [{}, AUXILIARY], ids=["no loss", "auxiliary loss"])
def test_attention_and_routers_beside_eager_experts(tower_module, router):
    """Of a router only the product is recorded; a loss counts real tokens."""
    trained = Trained(lm.build_model(lm.Shape(layers=2, hidden=1024, heads=8, ffn=768, experts=8), **router))
    assert assert_parts(trained, ("attn", "moe_router")) == 2
