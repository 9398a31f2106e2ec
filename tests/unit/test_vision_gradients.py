"""Replays beside eager passes: see `test_gradients.py` for what they add up."""

from .mixes import IMAGES, TOO_MANY_FRAMES
from .towers import forward, graphs_on, new_tower


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
