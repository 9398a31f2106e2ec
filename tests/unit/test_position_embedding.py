from functools import cache

import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.vision.grid_encoder import interpolate
from bridge_cg_plugin.vision.layout import token_positions

from .test_layout import MERGE, count, grids, padded, padding, unused_rows
from .towers import new_tower

dtypes = st.sampled_from([torch.float32, torch.bfloat16])
images = grids.map(lambda grid: [(1, h, w) for _, h, w in grid])


@cache
def model_of(dtype):
    return new_tower().to(dtype)


def both_ways(grid, spare, spare_rows, dtype):
    """Return (embedding, gradient of the table) of the plugin, with padding, and of Bridge."""
    model, tokens = model_of(dtype), count(grid)
    table = model.pos_embed.weight
    gradient = torch.randn(tokens, table.shape[1], generator=torch.Generator().manual_seed(tokens)).to(dtype)
    device_grid = padded(grid, spare_rows)
    found = interpolate(table, device_grid, token_positions(device_grid, tokens + spare, MERGE))
    poisoned = torch.cat((gradient, torch.full((spare, table.shape[1]), torch.nan, dtype=dtype)))
    expected = model.fast_pos_embed_interpolate(torch.tensor(grid))
    return (
        (found.detach(), torch.autograd.grad(found, table, poisoned)[0]),
        (expected.detach(), torch.autograd.grad(expected, table, gradient)[0]),
    )


@given(grids, padding, unused_rows, dtypes)
def test_the_embedding_is_bridges_bit_for_bit(grid, spare, spare_rows, dtype):
    (found, _), (expected, _) = both_ways(grid, spare, spare_rows, dtype)
    assert torch.equal(found[: count(grid)], expected)
    assert not found[count(grid) :].any()


@given(images, padding, unused_rows, dtypes)
def test_the_gradient_of_images_is_bridges_bit_for_bit(grid, spare, spare_rows, dtype):
    (_, found), (_, expected) = both_ways(grid, spare, spare_rows, dtype)
    assert torch.equal(found, expected)


@given(grids, padding, unused_rows, dtypes)
def test_the_gradient_of_videos_is_bridges_up_to_the_order_of_frames(grid, spare, spare_rows, dtype):
    (_, found), (_, expected) = both_ways(grid, spare, spare_rows, dtype)
    rounding = torch.finfo(dtype).eps
    assert torch.isfinite(found).all()
    assert (found - expected).float().norm() <= 2 * rounding * expected.float().norm()
