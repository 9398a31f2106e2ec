"""Replays and eager passes in one backward."""

import pytest

from .mixes import IMAGES, MIXED, TOO_MANY_FRAMES
from .test_gradients import DataParallel
from .towers import assert_close, draw, forward, graphs_on, loss_of, new_tower


def accumulate(model, passes):
    """Sum the losses of forward passes and run one backward; returns every `main_grad`."""
    sum(loss_of(run()) for run in passes).backward()
    return [p.main_grad for p in model.parameters()]


@pytest.mark.parametrize("kind", ["paused", "before capture", "with block arguments", "with too many frames"])
def test_every_eager_pass_adds_its_gradient_beside_a_replay_in_one_backward(kind):
    model, eager = new_tower(), new_tower()
    sides = [DataParallel(m) for m in (model, eager)]
    rows = TOO_MANY_FRAMES if kind == "with too many frames" else MIXED
    expected = accumulate(eager, [lambda: forward(eager, rows), lambda: forward(eager, IMAGES)])
    with graphs_on(model, capture=kind != "before capture") as graphs:
        if kind == "paused":
            with graphs.paused():
                eager = forward(model, MIXED)
        elif kind == "with too many frames":
            eager = forward(model, rows)
        elif kind == "before capture":
            eager = forward(model, MIXED)
            graphs.capture()
        else:
            hidden, deepstack = model(*draw(MIXED), extra_block_kwargs={"attention_bias": None})
            eager = [hidden, *deepstack]
        found = accumulate(model, [lambda: eager, lambda: forward(model, IMAGES)])
        assert graphs.statistics().replays == 1
    assert_close(found, expected)
    assert all(side.arrived for side in sides)


def test_an_eager_fallback_after_a_replay_is_no_first_microbatch():
    """A linear module that adds weight gradients to main_grad itself overwrites it in the first one that it sees."""
    model = new_tower()
    linear = model.decoder.layers[0].self_attention.linear_qkv
    with graphs_on(model, max_frames=4):
        linear.is_first_microbatch = True
        forward(model, IMAGES)
        assert linear.is_first_microbatch
        linear.is_first_microbatch = True
        forward(model, TOO_MANY_FRAMES)
        assert not linear.is_first_microbatch
