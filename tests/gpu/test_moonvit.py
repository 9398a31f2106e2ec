"""Kimi's MoonViT, a stand-in for its remote code at the published width, on real graphs of another package's region.

The numbers behind every assertion are printed (`pytest -s`).
"""

import copy

import torch

from tests.models.reference import without_tf32

from ..unit.moonvit_towers import PUBLISHED, SIDE, new_moonvit, region
from .common import poison
from .test_encoders import ALLOWANCE, PATCHES
from .test_parity import MIXES

LAYERS = 4
OF = ("from fp32: outputs", "gradients")
GRIDS = {name: MIXES[name] for name in ("video and images", "four images", "many tiny")}


class Case:
    """The tower, and images for it."""

    def __init__(self, tower_module):
        self.tower = new_moonvit(vt_num_hidden_layers=LAYERS, **PUBLISHED).cuda().bfloat16()
        self.compare = tower_module

    def on_graphs(self):
        from bridge_cg_plugin.options import VisionGraphOptions
        from bridge_cg_plugin.upstream.encoders.registry import FoundEncoder
        from bridge_cg_plugin.upstream.hooks.vision_helper import VisionTECudaGraphHelper

        options = VisionGraphOptions(impl="transformer_engine", strict=True, **PATCHES)
        found = FoundEncoder(self.tower.encoder, self.tower, region().MOONVIT)
        helper = VisionTECudaGraphHelper(self.tower, None, options=options, found=found)
        helper.create_cudagraphs()
        return helper

    def batch(self, rows, seed):
        """Return pixels, their grid on the device, announced as Bridge's batch step does, and the outputs' gradient."""
        from bridge_cg_plugin.upstream.host_batch import GRIDS

        generator = torch.Generator("cuda").manual_seed(seed)
        host = torch.tensor(rows)
        grid, tokens = host.cuda(), int(host.prod(1).sum())
        GRIDS.remember(grid, host)
        pixels = torch.randn(tokens, 3, SIDE, SIDE, device="cuda", generator=generator).bfloat16()
        weights = torch.randn(tokens // 4, 4, PUBLISHED["vt_hidden_size"], device="cuda", generator=generator)
        return pixels, grid, weights

    def results(self, tower, pixels, grid, weights):
        """Return the outputs and all gradients: those of patches and positions come through a replay."""
        tower.zero_grad()
        merged = torch.cat(tower(pixels.to(tower.dtype), grid))
        (merged.float() * weights[: len(merged)]).sum().backward()
        return merged.detach(), [parameter.grad.float() for parameter in tower.parameters()]

    def errors(self, found, exact):
        """Return how far outputs are from the exact ones, and gradients on average."""
        distances = [self.compare.relative(g, e) for g, e in zip(found[1], exact[1], strict=True)]
        return self.compare.relative(found[0], exact[0]), sum(distances) / len(distances)


def test_replays_are_as_near_to_fp32_as_eager(tower_module):
    """Eager attends item by item, in kernels that may split keys otherwise than packed ones."""
    case = Case(tower_module)
    reference = copy.deepcopy(case.tower).float()
    helper = case.on_graphs()
    for name, rows in GRIDS.items():
        batch = case.batch(rows, seed=len(name))
        with without_tf32():
            exact = case.results(reference, *batch)
        with helper.graphs.paused():
            eager = case.errors(case.results(case.tower, *batch), exact)
        poison(helper.graphs)
        replayed = case.errors(case.results(case.tower, *batch), exact)
        print(name, *(f"{what} {a:.2e} (eager {b:.2e})" for what, a, b in zip(OF, replayed, eager, strict=True)))
        assert replayed[0] <= ALLOWANCE * eager[0], name
        assert replayed[1] <= ALLOWANCE * eager[1], name
    statistics = helper.graphs.statistics()
    assert statistics.replays == len(GRIDS) and not statistics.fallbacks
    helper.delete_cuda_graphs()
