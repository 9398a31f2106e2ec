"""What is wrong with the pixels and the grid of a microbatch, in words; what eager takes is in test_batch_forms.py."""

import re

import pytest
import torch

from bridge_cg_plugin.vision.batch import (
    BatchError,
    EncoderBatch,
    HostGrids,
    check_device,
    patches_misfit,
    read_patches,
    shape_of,
)

CPU = torch.device("cpu")


def batch(rows, patches):
    grid = torch.tensor(rows)
    rows = tuple(map(tuple, grid.tolist()))
    return EncoderBatch(torch.zeros(patches, 12), rows, shape_of(rows)._replace(tokens=patches), grid)


def test_a_fitting_batch_passes():
    found = batch([[1, 4, 6], [3, 2, 2]], 36)
    assert patches_misfit(found, 2) is None
    assert (found.tokens, found.shape) == (36, (36, 4, 24))


@pytest.mark.parametrize("rows", [[[1, 3, 2]], [[1, 2, 5]], [[1, 2, 2], [1, 7, 2]]])
def test_sides_that_the_merge_does_not_divide(rows):
    patches = sum(t * h * w for t, h, w in rows)
    assert re.match(r"grid_thw\[\d\].*multiples of spatial_merge_size=2", patches_misfit(batch(rows, patches), 2))


@pytest.mark.parametrize("row", [[0, 2, 2], [1, 0, 2], [1, 2, 0], [-1, 2, -2], [-1, -2, 2]])
def test_sides_below_one(row):
    assert re.match(r"grid_thw\[1\].*at least 1", patches_misfit(batch([[1, 2, 2], row], 8), 2))


@pytest.mark.parametrize("patches", [0, 4, 23, 25, 48])
def test_patches_that_disagree_with_the_grid(patches):
    assert f"has {patches} patches, grid_thw describes 24" in patches_misfit(batch([[1, 4, 6]], patches), 2)


@pytest.mark.parametrize(
    ("pixels", "grid", "said"),
    [
        ((4, 12), torch.ones(1, 3), "grid_thw is torch.float32 (1, 3)"),
        ((4, 12), torch.ones(1, 1, 3, dtype=torch.int64), "grid_thw is torch.int64 (1, 1, 3)"),
        ((4, 12), [[1, 2, 2]], "grid_thw is list"),
        ((4, 13), torch.tensor([[1, 2, 2]]), "pixel_values has shape (4, 13) and strides (13, 1)"),
    ],
)
def test_what_no_encoder_reads(pixels, grid, said):
    with pytest.raises(BatchError, match=re.escape(said)):
        read_patches(HostGrids(), torch.zeros(pixels), grid, (3, 1, 2, 2), CPU)


@pytest.mark.parametrize("shape", [(4, 12), (1, 4, 12), (4, 3, 1, 2, 2), (2, 24), (48,)])
def test_pixels_become_rows_of_patches_without_a_copy(shape):
    pixels = torch.arange(48.0).view(shape)
    found = read_patches(HostGrids(), pixels, torch.tensor([[1, 2, 2]]), (3, 1, 2, 2), CPU)
    assert found.tokens == 4 and found.pixels.data_ptr() == pixels.data_ptr()
    assert torch.equal(found.pixels.reshape(4, 12), torch.arange(48.0).view(4, 12))


def test_pixels_elsewhere_than_the_encoder():
    with pytest.raises(BatchError, match="pixel_values is on meta, the encoder on cpu; move it there"):
        check_device(torch.empty(1, device="meta"), CPU)
