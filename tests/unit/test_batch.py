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


@pytest.mark.parametrize(
    ("rows", "patches", "said"),
    [
        ([[1, 4, 6], [3, 2, 2]], 36, None),
        ([[1, 2, 2], [1, 7, 2]], 18, "grid_thw[1]=(1, 7, 2): height and width must be multiples of"),
        ([[1, 2, 2], [-1, -2, 2]], 8, "grid_thw[1]=(-1, -2, 2): frames, height and width must be at least 1"),
        ([[1, 4, 6]], 25, "has 25 patches, grid_thw describes 24"),
    ],
)
def test_what_is_wrong_with_a_grid(rows, patches, said):
    found = patches_misfit(batch(rows, patches), 2)
    assert found is None if said is None else said in found


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


def test_pixels_elsewhere_than_the_encoder():
    with pytest.raises(BatchError, match="pixel_values is on meta, the encoder on cpu; move it there"):
        check_device(torch.empty(1, device="meta"), CPU)
