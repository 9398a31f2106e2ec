"""Parts that share a slot's memory replay right, or not at all, in whatever order a model runs them."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from bridge_cg_plugin.graphs.errors import ReplayError
from bridge_cg_plugin.options import OFFLOAD_MODULES
from bridge_cg_plugin.upstream.encoders import layer_parts

from ..pooled import PooledExecutor
from .towers import forward, graphs_on, loss_of, new_tower

ROWS, LAYERS = [(1, 8, 8), (2, 4, 8)], 3
MODULES = pytest.mark.parametrize("modules", [("attn",), ("mlp",)], ids=",".join)


@contextmanager
def on_parts(tower, modules, **options):
    """Put graphs of parts of layers on a tower, whose activations leave."""
    settings = {"buckets": (128,), "offload_min_bytes": 1024, "offload": OFFLOAD_MODULES, **options}
    with graphs_on(tower, executor=PooledExecutor(), modules=modules, **settings) as graphs:
        yield graphs


def gradients_of(outputs, tower):
    return torch.autograd.grad(loss_of(outputs), list(tower.parameters()), allow_unused=True)


def same(found, right) -> bool:
    pairs = list(zip(found, right, strict=True))
    assert [a is None for a, _ in pairs] == [b is None for _, b in pairs]
    return all(torch.allclose(a, b, atol=1e-5, rtol=1e-4) for a, b in pairs if a is not None)


def cut_behind_first_layer(tower):
    """Let no gradient of the second layer flow into the first, whose output is one of the tower's."""
    layer = tower.decoder.layers[1]
    run = layer.forward
    layer.forward = lambda hidden_states, *args, **kwargs: run(hidden_states.detach(), *args, **kwargs)
    return tower


@MODULES
def test_backwards_of_later_parts_first(modules):
    tower = cut_behind_first_layer(new_tower())

    def run():
        embeddings, early, _ = forward(tower, ROWS)
        return gradients_of([embeddings], tower), gradients_of([early], tower)

    right = run()
    with on_parts(tower, modules) as graphs:
        for _ in range(2):
            assert all(map(same, run(), right))
        assert graphs.statistics().replays == 2 * LAYERS


@MODULES
def test_a_backward_behind_that_of_an_earlier_part_fails(modules):
    """The earlier part's has overwritten what it needs; the next microbatch is right again."""
    tower = cut_behind_first_layer(new_tower())
    embeddings, early, _ = forward(tower, ROWS)
    right = gradients_of([early], tower), gradients_of([embeddings], tower)
    del embeddings, early
    with on_parts(tower, modules) as graphs:
        for _ in range(2):
            embeddings, early, _ = forward(tower, ROWS)
            assert same(gradients_of([early], tower), right[0])
            with pytest.raises(ReplayError, match="came after that of an earlier layer"):
                gradients_of([embeddings], tower)
            embeddings = forward(tower, ROWS)[0]
            assert same(gradients_of([embeddings], tower), right[1])
            del embeddings, early
        assert not graphs.statistics().fallbacks


@MODULES
def test_a_part_that_nothing_asks_for_loses_its_activations(modules):
    """Its output is held, but only an earlier part's backward runs."""
    tower = cut_behind_first_layer(new_tower())
    right = gradients_of(forward(tower, ROWS)[1:2], tower)
    with on_parts(tower, modules) as graphs:
        outputs = [forward(tower, ROWS)]
        assert same(gradients_of(outputs[0][1:2], tower), right)
        outputs.append(forward(tower, ROWS))  # in the same slot
        assert same(gradients_of(outputs[1][1:2], tower), right)
        assert graphs.statistics().replays == 2 * LAYERS and not graphs.statistics().fallbacks


@MODULES
def test_layers_in_another_order(modules):
    tower, order = new_tower(), [0, 1, 2]
    runs = [layer.forward for layer in tower.decoder.layers]
    for place, layer in enumerate(tower.decoder.layers):
        layer.forward = lambda *args, place=place, **kwargs: runs[order[place]](*args, **kwargs)

    def run(*now):
        order[:] = now
        return gradients_of(forward(tower, ROWS), tower)

    orders = [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1), (0, 0, 2), (0, 1, 2)]
    right = [run(*now) for now in orders]
    with on_parts(tower, modules) as graphs:
        found = [run(*now) for now in orders]
        assert all(map(same, found, right))
        assert graphs.statistics().fallbacks == {"parts_in_another_order": 4, "no_free_slot": 1}


def test_parts_with_limits_of_their_own(monkeypatch):
    """Each is recorded for the others' limits too; a microbatch replays what one capture recorded."""
    made, tower = layer_parts._attention, new_tower()
    right = gradients_of(forward(tower, ROWS), tower)

    def with_own_limits(layer, *args):
        return replace(made(layer, *args), limits=lambda frames: (frames + layer.layer_number,))

    monkeypatch.setattr(layer_parts, "_attention", with_own_limits)
    with on_parts(tower, ("attn",)) as graphs:
        assert len({region.buckets for region in graphs._regions}) == LAYERS
        for _ in range(2):
            assert same(gradients_of(forward(tower, ROWS), tower), right)
        assert graphs.statistics().replays == 2


def scaled_by_a_list(tower, now):
    """Let the last layer's attention be scaled by what a list of it holds, which the first layer writes at its end."""
    first, attention = tower.decoder.layers[0], tower.decoder.layers[2].self_attention
    attention.factor = [1.0]
    run, attend = first.forward, attention.forward

    def forward(*args, **kwargs):
        made = run(*args, **kwargs)
        attention.factor[0] = now[0]
        return made

    def scaled(*args, **kwargs):
        out, bias = attend(*args, **kwargs)
        return out * attention.factor[0], bias

    first.forward, attention.forward = forward, scaled
    return tower


@pytest.mark.parametrize("offload", [OFFLOAD_MODULES, None], ids=["chain", "apart"])
def test_a_list_that_a_forward_changes_before_a_part_runs(offload):
    now = [1.0]
    right, tower = (scaled_by_a_list(new_tower(), now) for _ in range(2))
    with on_parts(tower, ("attn",), offload=offload) as graphs:
        for now[0] in (1.0, 1e3, 2e3):
            assert torch.allclose(forward(tower, ROWS)[0], forward(right, ROWS)[0], atol=1e-5, rtol=1e-4)
        assert graphs.statistics().replays >= LAYERS
