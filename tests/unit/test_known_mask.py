"""Indexing by a mask that the host knows: what a plain mask gives, without asking the device for the places."""

import pytest
import torch

from bridge_cg_plugin.vision.known_mask import KnownMask
from tests.unit.waits import HostWait, no_host_waits

SHAPES = [(1, 7), (2, 5), (3, 4), (6,)]


def masks(shape, seed=0, share=0.5):
    torch.manual_seed(seed)
    plain = torch.rand(shape) < share
    return plain, KnownMask(plain, plain.clone())


def written(mask, rows, base):
    """What upstream does with image features, then with deepstack features."""
    base, rows = base.clone().requires_grad_(), rows.clone().requires_grad_()
    target = base * 2
    target[mask] = rows
    added = target.clone()
    added[mask, :] = target[mask, :].clone() + rows
    (added * torch.arange(added.numel()).view_as(added)).sum().backward()
    return added.detach(), target.detach(), base.grad, rows.grad


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_elements_and_gradients_are_those_of_the_plain_mask(shape, share, dtype, deterministic):
    plain, mask = masks(shape, share=share)
    rows, base = torch.randn(int(plain.sum()), 3, dtype=dtype), torch.randn(*shape, 3, dtype=dtype)
    torch.use_deterministic_algorithms(deterministic)
    try:
        expected = written(plain, rows, base)
        with no_host_waits():
            found = written(mask, rows, base)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


def test_features_of_another_number_are_refused():
    plain, mask = masks((2, 5))
    for index in (plain, mask):
        with pytest.raises(RuntimeError, match="shape mismatch"):
            torch.zeros(2, 5, 3)[index] = torch.zeros(int(plain.sum()) + 1, 3)


def test_a_mask_of_another_shape_is_refused():
    for index in masks((2, 5)):
        with pytest.raises(IndexError, match="shape of the mask"):
            torch.zeros(2, 4, 3)[index]
        with pytest.raises(IndexError, match="shape of the mask"):
            torch.zeros(2, 4, 3)[index] = torch.zeros(1, 3)


def test_a_mask_that_was_written_to_is_asked_again():
    _, mask = masks((2, 5))
    mask.fill_(True)
    assert torch.zeros(2, 5, 3)[mask].shape == (10, 3)
    target = torch.zeros(2, 5, 3)
    target[mask] = torch.ones(10, 3)
    assert target.eq(1).all()
    with no_host_waits(), pytest.raises(HostWait):
        target[mask]


def test_recomputed_layers_keep_the_places():
    _, mask = masks((2, 6))
    kept = mask.detach()
    with no_host_waits():
        assert isinstance(kept, KnownMask) and torch.zeros(2, 6, 3)[kept].shape[0] == mask.places[0].shape[0]
    mask.fill_(False)
    assert type(mask.detach()) is torch.Tensor
