import pytest
import torch

from bridge_cg_plugin.vision.batch import BatchError, VisionBatch, check_batch
from bridge_cg_plugin.vision.grids import as_grid


def batch(rows, patches):
    grid = torch.tensor(rows)
    return VisionBatch(torch.zeros(patches, 12), grid, as_grid(grid))


def test_a_fitting_batch_passes():
    found = batch([[1, 4, 6], [3, 2, 2]], 36)
    check_batch(found, 2)
    assert (found.tokens, found.frames, found.largest_frame) == (36, 4, 24)


@pytest.mark.parametrize("rows", [[[1, 3, 2]], [[1, 2, 5]], [[1, 2, 2], [1, 7, 2]]])
def test_sides_that_the_merge_does_not_divide(rows):
    patches = sum(t * h * w for t, h, w in rows)
    with pytest.raises(BatchError, match=r"grid_thw\[\d\].*multiples of spatial_merge_size=2"):
        check_batch(batch(rows, patches), 2)


@pytest.mark.parametrize("row", [[0, 2, 2], [1, 0, 2], [1, 2, 0], [-1, 2, -2], [-1, -2, 2]])
def test_sides_below_one(row):
    with pytest.raises(BatchError, match=r"grid_thw\[1\].*at least 1"):
        check_batch(batch([[1, 2, 2], row], 8), 2)


@pytest.mark.parametrize("patches", [0, 4, 23, 25, 48])
def test_patches_that_disagree_with_the_grid(patches):
    with pytest.raises(BatchError, match=f"has {patches} patches, grid_thw describes 24"):
        check_batch(batch([[1, 4, 6]], patches), 2)


def test_the_named_row_is_the_wrong_one():
    with pytest.raises(BatchError, match=r"grid_thw\[2\]=\(1, 4, 3\)"):
        check_batch(batch([[1, 2, 2], [1, 2, 2], [1, 4, 3]], 20), 2)


def test_another_merge_size():
    check_batch(batch([[1, 6, 3]], 18), 3)
    with pytest.raises(BatchError, match="spatial_merge_size=3"):
        check_batch(batch([[1, 6, 4]], 24), 3)
