"""What the host knows of the device's tensors: grids, and masks that index without a wait."""

import pytest
import torch

from bridge_cg_plugin.graphs.host_copies import HostTensors
from bridge_cg_plugin.vision.batch import HostGrids
from bridge_cg_plugin.vision.known_mask import KnownMask
from tests.unit.waits import HostWait, no_host_waits

ROWS = ((1, 4, 6), (3, 2, 8))


def device_grid(rows=ROWS):
    """A tensor off the host whose values cannot be read: reading it raises."""
    return torch.tensor(rows).to("meta")


def remembered(grid, rows=ROWS):
    grids = HostGrids()
    grids.remember(grid, torch.tensor(rows))
    return grids


def assert_read(grids, grid):
    """The device is asked, which raises here."""
    reads = grids.device_reads
    with pytest.raises(NotImplementedError):
        grids.lookup(grid)
    assert grids.device_reads == reads + 1


def test_host_grids_are_read_as_they_are():
    grids, grid = HostGrids(), torch.tensor(ROWS)
    assert grids.lookup(grid) == grids.lookup(grid[None].int()) == ROWS
    grid[0, 0] = 5
    assert grids.lookup(grid)[0] == (5, 4, 6) and grids.device_reads == 0


@pytest.mark.parametrize("inference", [False, True])
def test_a_remembered_grid_is_found_through_any_view_of_its_beginning(inference):
    with torch.inference_mode(inference):
        grid = device_grid()[None]
    grids = remembered(grid)
    for view in (grid, grid[0], grid.view(-1, 3), grid.reshape(2, 3), grid.detach(), grid.flatten(0, 1)):
        assert grids.lookup(view) == ROWS
    assert grids.lookup(grid[0, :1]) == ROWS[:1] and grids.device_reads == 0
    for part in (grid[0, 1:], grid[0].t(), grid[0, :, 0]):
        assert_read(grids, part)


def test_parts_of_one_tensor_are_told_apart():
    whole = device_grid()
    grids = remembered(whole[:1], ROWS[:1])
    assert_read(grids, whole)
    assert_read(grids, whole[1:])
    grids.remember(whole[1:], torch.tensor(ROWS[1:]))
    assert (grids.lookup(whole[:1]), grids.lookup(whole[1:])) == (ROWS[:1], ROWS[1:])


@pytest.mark.parametrize("through_view", [False, True])
def test_a_grid_changed_in_place_is_not_trusted_until_it_is_remembered_again(through_view):
    grid = device_grid()
    grids = remembered(grid)
    (grid.view(-1) if through_view else grid).add_(1)
    assert_read(grids, grid)
    grids.remember(grid, torch.tensor(ROWS) + 1)
    assert grids.lookup(grid) == ((2, 5, 7), (4, 3, 9))


def test_a_freed_grids_storage_names_no_other():
    grids = HostGrids()
    for _ in range(20):
        grids.remember(device_grid(), torch.tensor(ROWS))
    for _ in range(20):
        assert_read(grids, device_grid())


def test_only_the_latest_are_kept():
    grids, kept = HostGrids(capacity=3), [device_grid() for _ in range(5)]
    for index, grid in enumerate(kept):
        grids.remember(grid, torch.tensor(ROWS) + index)
    assert [grids.lookup(g)[0][0] for g in kept[2:]] == [3, 4, 5]
    assert_read(grids, kept[1])


def test_a_remembered_tensor_is_found_in_the_shape_of_any_view():
    tensors, device, host = HostTensors(), torch.zeros(2, 3).to("meta"), torch.arange(6).view(2, 3)
    tensors.remember(device, host)
    expected = host.clone()
    host.zero_()  # a data loader may fill its memory anew
    assert tensors.known(device).equal(expected) and tensors.known(device.view(1, -1)).equal(expected.view(1, -1))
    assert tensors.known(device[:1]) is None and tensors.known(device.clone()) is None
    device.add_(1)
    assert tensors.known(device) is None


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


def test_features_of_another_number_and_masks_of_another_shape_are_refused():
    for index in masks((2, 5)):
        with pytest.raises(RuntimeError, match="shape mismatch"):
            torch.zeros(2, 5, 3)[index] = torch.zeros(int(index.sum()) + 1, 3)
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
