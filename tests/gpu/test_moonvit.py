"""Kimi's MoonViT, a stand-in for its remote code at the published width, on real graphs of another package's region.

The numbers behind every assertion are printed (`pytest -s`).
"""

import copy

import pytest
import torch

from tests.models.reference import without_tf32

from ..unit.moonvit_towers import PUBLISHED, SIDE, new_moonvit, region
from .test_encoders import ALLOWANCE, PATCHES
from .test_parity import MIXES, poison

LAYERS = 4
OF = ("from fp32: outputs", "gradients")


class Case:
    """The tower, with gradients of its layers in `main_grad`."""

    def __init__(self, tower_module):
        self.tower = new_moonvit(vt_num_hidden_layers=LAYERS, **PUBLISHED).cuda().bfloat16()
        self.layers, self.compare = self.tower.encoder, tower_module
        self.grads = tower_module.MainGrads(self.layers)

    def on_graphs(self):
        from bridge_cg_plugin.options import VisionGraphOptions
        from bridge_cg_plugin.upstream.encoders.registry import FoundEncoder
        from bridge_cg_plugin.upstream.hooks.vision_helper import VisionTECudaGraphHelper

        options = VisionGraphOptions(impl="transformer_engine", strict=True, **PATCHES)
        found = FoundEncoder(self.layers, self.tower, region().MOONVIT)
        helper = VisionTECudaGraphHelper(self.tower, None, options=options, found=found)
        helper.create_cudagraphs()
        return helper

    def batch(self, rows, seed):
        """Return hidden states, their grid on the device and gradients of the outputs."""
        generator = torch.Generator("cuda").manual_seed(seed)
        grid = self.grid(rows)
        shape = (int(torch.tensor(rows).prod(1).sum()), PUBLISHED["vt_hidden_size"])
        hidden, gradient = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(2))
        return hidden.requires_grad_(), grid, gradient

    def grid(self, rows):
        """Return a grid on the device that is announced to the plugin as Bridge's batch step does."""
        from bridge_cg_plugin.upstream.host_batch import GRIDS

        host = torch.tensor(rows)
        grid = host.cuda()
        GRIDS.remember(grid, host)
        return grid

    def run(self, hidden, grid, gradient):
        """Return the outputs, and the gradients of what goes in and of the weights."""
        self.grads.zero()
        hidden.grad = None
        outputs = self.layers(hidden, grid)
        outputs.backward(gradient)
        return outputs.detach(), [hidden.grad.float(), *self.grads.copy()]

    def errors(self, found, exact):
        """Return how far outputs are from the exact ones, and gradients on average."""
        distances = [self.compare.relative(g, e) for g, e in zip(found[1], exact[1], strict=True)]
        return self.compare.relative(found[0], exact[0]), sum(distances) / len(distances)


@pytest.fixture
def case(tower_module):
    made = Case(tower_module)
    yield made
    made.__dict__.clear()
    torch.cuda.empty_cache()


def exactly(layers, hidden, grid, gradient):
    """Return the outputs and gradients of a copy in fp32."""
    hidden = hidden.detach().float().requires_grad_()
    with without_tf32():
        outputs = layers(hidden, grid)
        gradients = torch.autograd.grad(outputs, [hidden, *layers.parameters()], gradient.float())
    return outputs.detach(), list(gradients)


def test_replays_are_as_near_to_fp32_as_eager(case):
    """Eager attends item by item, in kernels that may split keys otherwise than packed ones."""
    reference = copy.deepcopy(case.layers).float()
    helper = case.on_graphs()
    for name, rows in MIXES.items():
        batch = case.batch(rows, seed=len(name))
        exact = exactly(reference, *batch)
        with helper.graphs.paused():
            eager = case.errors(case.run(*batch), exact)
        poison(helper.graphs)
        replayed = case.errors(case.run(*batch), exact)
        print(name, *(f"{what} {a:.2e} (eager {b:.2e})" for what, a, b in zip(OF, replayed, eager, strict=True)))
        assert replayed[0] <= ALLOWANCE * eager[0], name
        assert replayed[1] <= ALLOWANCE * eager[1], name
    statistics = helper.graphs.statistics()
    assert statistics.replays == len(MIXES) and not statistics.fallbacks
    helper.delete_cuda_graphs()


def test_a_replayed_forward_and_backward_read_nothing_on_the_host(case):
    helper = case.on_graphs()
    batch = case.batch(MIXES["video and images"], seed=1)
    case.run(*batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.run(*batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert helper.graphs.statistics().replays == 2
    helper.delete_cuda_graphs()


def test_gradients_of_patches_and_positions_are_as_near_to_fp32_as_eager(case):
    """They reach what is outside the region through a replay."""
    reference = copy.deepcopy(case.tower).float()
    helper = case.on_graphs()
    rows = [(4, 10, 14), (1, 28, 20), (1, 6, 4)]
    grid, tokens = case.grid(rows), int(torch.tensor(rows).prod(1).sum())
    generator = torch.Generator("cuda").manual_seed(1)
    pixels = torch.randn(tokens, 3, SIDE, SIDE, device="cuda", generator=generator).bfloat16()
    weights = torch.randn(tokens // 4, 4, PUBLISHED["vt_hidden_size"], device="cuda", generator=generator)

    def results(tower):
        merged = torch.cat(tower(pixels.to(tower.dtype), grid))
        loss = (merged.float() * weights[: len(merged)]).sum()
        gradients = torch.autograd.grad(loss, list(tower.patch_embed.parameters()))
        return merged.detach(), [gradient.float() for gradient in gradients]

    with without_tf32():
        exact = results(reference)
    with helper.graphs.paused():
        eager = case.errors(results(case.tower), exact)
    replayed = case.errors(results(case.tower), exact)
    print(*(f"{what} {a:.2e} (eager {b:.2e})" for what, a, b in zip(OF, replayed, eager, strict=True)))
    assert replayed[0] <= ALLOWANCE * eager[0]
    assert replayed[1] <= ALLOWANCE * eager[1]
    assert helper.graphs.statistics().replays == 1
    helper.delete_cuda_graphs()
