"""Inputs whose gradient no graph returns: such a microbatch runs eager, counted, with eager's gradient."""

import pytest
import torch

from bridge_cg_plugin.graphs.fallback import Fallback

from . import packs
from .mixes import IMAGES
from .towers import assert_close, draw, graphs_on, loss_of, new_tower

PACK = packs.pack((120, 150))


def of_pixels(model):
    """Return outputs of the encoder, the pixels' gradient and the parameters'."""
    pixels, grid = draw(IMAGES)
    hidden, deepstack = model(pixels.requires_grad_(), grid)
    return with_gradients(model, pixels, [hidden, *deepstack])


def of_angles(model):
    """Return losses, the gradient of the decoder's rotary angles and the parameters'."""
    seen = []

    def want(module, args, kwargs):
        seen.append(kwargs["rotary_pos_emb"].detach().clone().requires_grad_())
        return args, {**kwargs, "rotary_pos_emb": seen[-1]}

    handle = model.decoder.register_forward_pre_hook(want, with_kwargs=True)
    losses = model(**PACK)
    handle.remove()
    return with_gradients(model, *seen, [losses])


def with_gradients(model, given, outputs):
    wanted = [given, *(p for p in model.parameters() if p.requires_grad)]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(loss_of(outputs), wanted)]


def without_a_backward(model):
    pixels, grid = draw(IMAGES)
    with torch.no_grad():
        model.eval()(pixels.requires_grad_(), grid)


def pack_graphs(*modules):
    return lambda model: packs.graphs_on(model, packs.pack((100, 150, 50)), cuda_graph_modules=[*modules])


def frozen_tower():
    return new_tower().requires_grad_(False)


# Builds the model, puts graphs on it; wants the gradient, and runs without wanting one.
CASES = {
    "pixels": (new_tower, graphs_on, of_pixels, without_a_backward),
    "pixels of a frozen encoder": (frozen_tower, graphs_on, of_pixels, without_a_backward),
    "angles of whole layers": (packs.new_model, pack_graphs(), of_angles, lambda model: model(**PACK)),
    "angles of attention": (packs.new_model, pack_graphs("attn"), of_angles, lambda model: model(**PACK)),
}


@pytest.mark.parametrize("new, graphs_on, trained, untrained", CASES.values(), ids=CASES)
def test_an_input_gets_eagers_gradient_and_is_replayed_where_none_is_wanted(new, graphs_on, trained, untrained):
    model = new()
    expected = trained(model)
    with graphs_on(model) as graphs:
        assert_close(trained(model), expected, 0.0)
        assert graphs.statistics().fallbacks == {Fallback.INPUT_GRADIENTS: 1}
        assert graphs.statistics().replays == 0
        untrained(model)
        assert graphs.statistics().fallbacks == {Fallback.INPUT_GRADIENTS: 1}
        assert graphs.statistics().replays > 0
