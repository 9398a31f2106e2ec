"""The executor that tests record with: what is NaN on it must be what a graph leaves unwritten."""

import torch

from ..tape import Tape


def test_what_nothing_wrote_is_nan_after_a_replay():
    with Tape() as tape:
        out = torch.empty(4)
        out[:2].fill_(1.0)
        like = torch.empty_like(out).copy_(torch.zeros(4))
    tape.replay()
    assert out[:2].tolist() == [1.0, 1.0] and out[2:].isnan().all()
    assert like.tolist() == [0.0] * 4
