"""Parts that share a slot's memory replay right, or not at all, in whatever order a model runs them."""

import pytest
import torch

from bridge_cg_plugin.graphs.errors import ReplayError

from ..pooled import PooledExecutor
from .packed_parts import LARGE, losses, new_model, on_parts
from .towers import loss_of

LAYERS = 3


def on_pooled_parts(model, modules):
    """Put graphs of parts of layers on a model, whose activations leave."""
    return on_parts(model, modules, executor=PooledExecutor(), buckets=[512])


def gradients_of(made, model):
    return torch.autograd.grad(loss_of([made]), list(model.parameters()), allow_unused=True)


def same(found, right) -> bool:
    pairs = list(zip(found, right, strict=True))
    assert [a is None for a, _ in pairs] == [b is None for _, b in pairs]
    return all(torch.allclose(a, b, atol=1e-5, rtol=1e-4) for a, b in pairs if a is not None)


class Cut:
    """A model whose second layer hands no gradient to the first, and what its first layer returns."""

    def __init__(self):
        self.model = new_model()
        first, second = self.model.decoder.layers[:2]
        first.register_forward_hook(self._keep)
        run = second.forward
        second.forward = lambda hidden_states, *args, **kwargs: run(hidden_states.detach(), *args, **kwargs)

    def _keep(self, layer, args, outputs):
        self._early = outputs[0]

    def run(self):
        """Return losses and the output of the first layer."""
        made = losses(self.model, LARGE)
        early, self._early = self._early, None
        return made, early


def test_backwards_of_later_parts_first():
    cut, modules = Cut(), ("attn",)

    def run():
        made, early = cut.run()
        return gradients_of(made, cut.model), gradients_of(early, cut.model)

    right = run()
    with on_pooled_parts(cut.model, modules) as graphs:
        for _ in range(2):
            assert all(map(same, run(), right))
        assert graphs.statistics().replays == 2 * LAYERS


def test_a_backward_behind_that_of_an_earlier_part_fails():
    """The earlier part's has overwritten what it needs; the next microbatch is right again."""
    cut, modules = Cut(), ("mlp",)
    made, early = cut.run()
    right = gradients_of(early, cut.model), gradients_of(made, cut.model)
    del made, early
    with on_pooled_parts(cut.model, modules) as graphs:
        for _ in range(2):
            made, early = cut.run()
            assert same(gradients_of(early, cut.model), right[0])
            with pytest.raises(ReplayError, match="came after that of an earlier layer"):
                gradients_of(made, cut.model)
            made, early = cut.run()
            assert same(gradients_of(made, cut.model), right[1])
            del made, early
        assert not graphs.statistics().fallbacks


def test_layers_in_another_order():
    model, order, modules = new_model(), [0, 1, 2], ("attn",)
    runs = [layer.forward for layer in model.decoder.layers]
    for place, layer in enumerate(model.decoder.layers):
        layer.forward = lambda *args, place=place, **kwargs: runs[order[place]](*args, **kwargs)

    def run(*now):
        order[:] = now
        return gradients_of(losses(model, LARGE), model)

    orders = [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1), (0, 0, 2), (0, 1, 2)]
    right = [run(*now) for now in orders]
    with on_pooled_parts(model, modules) as graphs:
        found = [run(*now) for now in orders]
        assert all(map(same, found, right))
        assert graphs.statistics().fallbacks == {"parts_in_another_order": 4, "no_free_slot": 1}
