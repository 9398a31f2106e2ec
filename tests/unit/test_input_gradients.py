"""Inputs whose gradient no graph returns: such a microbatch runs eager, counted, with eager's gradient."""

from contextlib import contextmanager

import pytest
import torch

from bridge_cg_plugin.graphs.fallback import Fallback

from . import packs
from .hugging_face_towers import SIDE, draw_images, new_siglip
from .mixes import IMAGES
from .towers import assert_close, draw, graphs_on, loss_of, new_tower

PATCHES = (SIDE // 14) ** 2


def run_qwen3(model, pixels, grid):
    hidden, deepstack = model(pixels, grid)
    return [hidden, *deepstack]


def run_siglip(model, pixels):
    return [model(pixels, return_dict=True).last_hidden_state]


FAMILIES = {
    "qwen3-vl": (new_tower, run_qwen3, lambda: draw(IMAGES), {}),
    "siglip": (new_siglip, run_siglip, lambda: (draw_images(2),), {"buckets": (2 * PATCHES, 4 * PATCHES)}),
}


def trained(model, run, batch):
    """Return outputs, the pixels' gradient and the parameters'."""
    pixels = batch[0].clone().requires_grad_()
    outputs = run(model, pixels, *batch[1:])
    wanted = [pixels, *(p for p in model.parameters() if p.requires_grad)]
    return [*outputs, *torch.autograd.grad(loss_of(outputs), wanted)]


@pytest.mark.parametrize("family, frozen", [*((family, False) for family in FAMILIES), ("qwen3-vl", True)])
def test_pixels_get_eagers_gradient_and_are_replayed_where_none_is_wanted(family, frozen):
    new, run, batch, options = FAMILIES[family]
    model = new().requires_grad_(not frozen)
    expected = trained(model, run, batch())
    with graphs_on(model, **options) as graphs:
        assert_close(trained(model, run, batch()), expected, 0.0)
        assert graphs.statistics().fallbacks == {Fallback.INPUT_GRADIENTS: 1}
        assert graphs.statistics().replays == 0
        pixels, *others = batch()
        with torch.no_grad():
            run(model.eval(), pixels.requires_grad_(), *others)
        assert graphs.statistics().fallbacks == {Fallback.INPUT_GRADIENTS: 1}
        assert graphs.statistics().replays == 1


@contextmanager
def angles_want_gradients(decoder):
    """Let the decoder be called with rotary angles that require a gradient; yields those angles."""
    seen = []

    def want(module, args, kwargs):
        seen.append(kwargs["rotary_pos_emb"].detach().clone().requires_grad_())
        return args, {**kwargs, "rotary_pos_emb": seen[-1]}

    handle = decoder.register_forward_pre_hook(want, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def packed_results(model):
    with angles_want_gradients(model.decoder) as angles:
        losses = model(**packs.pack((120, 150)))
        weights = torch.linspace(0.5, 1.5, losses.numel()).view(losses.shape)
        wanted = [*angles, *model.parameters()]
        return [losses.detach(), *torch.autograd.grad((losses * weights).sum(), wanted)]


@pytest.mark.parametrize("modules", [[], ["attn"]], ids=["whole", "attn"])
def test_rotary_angles_of_packed_layers_get_eagers_gradient(modules):
    model = packs.new_model()
    expected = packed_results(model)
    with packs.graphs_on(model, packs.pack((100, 150, 50)), cuda_graph_modules=modules) as graphs:
        assert_close(packed_results(model), expected, 0.0)
        assert graphs.statistics().fallbacks == {Fallback.INPUT_GRADIENTS: 1}
        assert graphs.statistics().replays == 0
        packs.losses_and_gradients(model, packs.pack((120, 150)))
        assert graphs.statistics().replays > 0
