"""Backward of norms over heads on a GPU: Transformer Engine's bits, in less time."""

from contextlib import nullcontext

import pytest
import torch

from scripts.performance import measure
from tests.models import language_model as lm

from .packs import Trained, graphs_on

HEADS = 16
# A 8B model's queries of a pack on one of two ranks.
PACK = 2816 * HEADS


def arguments(rows, zero_centered=False):
    x, gradient = (torch.randn(rows, 128, device="cuda").bfloat16() for _ in range(2))
    weight = torch.rand(128, device="cuda").bfloat16()
    return gradient, x, (x.float().square().mean(1) + 1e-6).rsqrt(), weight, zero_centered


def both(gradient, x, rstd, weight, zero_centered):
    """Return what computes Transformer Engine's gradients, and the plugin's."""
    from transformer_engine.pytorch.ops.basic.rmsnorm import rmsnorm_bwd

    from bridge_cg_plugin.vision.kernels import head_norms

    most = head_norms.most_blocks(torch.cuda.current_device(), rmsnorm_bwd)
    assert most is not None
    return (
        lambda: rmsnorm_bwd(gradient, x, rstd, weight, 0, zero_centered),
        lambda: head_norms.backward(gradient, x, rstd, weight, zero_centered, most),
    )


@pytest.mark.first
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 127, 1584, 6336, 6337, 22528, PACK, 100_003])
def test_bits_are_transformer_engines(rows, zero_centered):
    torch.manual_seed(rows)
    expected, found = both(*arguments(rows, zero_centered))
    assert all(map(torch.equal, found(), expected()))


def test_less_time(tower_module):
    expected, found = both(*arguments(PACK))
    assert measure.profile(found).busy_ms < 0.8 * measure.profile(expected).busy_ms


def test_graphs_of_packs_run_them(tower_module):
    trained = Trained(lm.build_model(lm.Shape(layers=2, hidden=1024, heads=8, ffn=1024)))
    pack = lm.make_pack((500, 200))
    kernels = {}
    for name in ("eager", "graphs"):
        with graphs_on(trained.model, pack) as graphs:
            with graphs.paused() if name == "eager" else nullcontext():
                kernels[name] = measure.profile(lambda: trained.results(pack)).by_name
            assert graphs.statistics().replays == (name == "graphs"), graphs.statistics().fallbacks
    theirs, ours = "rmsnorm_bwd_finalize_general", "_rows_backward"
    for name, used, unused in (("eager", theirs, ours), ("graphs", ours, theirs)):
        assert any(used in kernel for kernel in kernels[name]), sorted(kernels[name])
        assert not any(unused in kernel for kernel in kernels[name]), sorted(kernels[name])
