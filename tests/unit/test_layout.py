"""Positions, segments and attention windows of a grid, and position embeddings, beside upstream's own."""

from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_window_index

from bridge_cg_plugin.vision.grid_encoder import interpolate
from bridge_cg_plugin.vision.layout import (
    most_windows,
    rotary_angles,
    segment_offsets,
    token_positions,
    window_offsets,
    window_order,
)

from .towers import new_tower, tower

MERGE = 2
rows = st.tuples(
    st.integers(1, 4), st.integers(1, 12).map(lambda n: MERGE * n), st.integers(1, 12).map(lambda n: MERGE * n)
)
grids = st.lists(rows, min_size=1, max_size=5)
padding = st.integers(0, 130)
unused_rows = st.integers(0, 3)


def padded(grid, spare_rows):
    return torch.tensor([*grid, *[(0, 0, 0)] * spare_rows])


def count(grid):
    return sum(t * h * w for t, h, w in grid)


@given(grids, padding, unused_rows)
def test_positions_give_bridges_rotary_angles_bit_for_bit(grid, spare, spare_rows):
    model = tower()
    expected = model.rot_pos_emb(torch.tensor(grid))
    expected = expected.reshape(len(expected), 1, 1, -1).repeat(1, 1, 1, 2)
    positions = token_positions(padded(grid, spare_rows), count(grid) + spare, MERGE)
    angles = rotary_angles(positions, model.rotary_pos_emb.inv_freq)
    assert angles.shape[0] == count(grid) + spare
    assert torch.equal(angles[: count(grid)], expected)
    assert not angles[count(grid) :].any()


@given(grids, unused_rows, st.integers(0, 20))
def test_offsets_are_bridges_cu_seqlens_then_empty_segments(grid, spare_rows, spare_segments):
    expected = tower().build_packed_seq_params(torch.tensor(grid)).cu_seqlens_q
    frames = sum(t for t, _, _ in grid)
    offsets = segment_offsets(padded(grid, spare_rows), frames + spare_segments)
    assert offsets.dtype == expected.dtype == torch.int32
    assert torch.equal(offsets[: frames + 1], expected)
    assert (offsets[frames + 1 :] == count(grid)).all()


PATCH = 14
merges = st.sampled_from([1, 2, 3])
sides = st.sampled_from([1, 2, 3, 4])
sizes = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4)
spare = st.integers(0, 40)


@given(sizes, merges, sides, spare)
def test_windows_are_theirs_padding_stays_and_further_windows_have_no_length(images, merge, side, more):
    patches, cells = [(t, h * merge, w * merge) for t, h, w in images], count(images)
    grid, window = padded(patches, 2), side * merge * PATCH
    order, place, _ = window_order(grid, cells + more, merge, side)
    expected_order, expected = get_vision_window_index(torch.tensor(patches), merge, window, PATCH)
    assert torch.equal(order[:cells], expected_order)
    assert torch.equal(order[cells:], torch.arange(cells, cells + more))
    assert torch.equal(order[place], torch.arange(cells + more))
    windows = most_windows(cells, sum(t for t, _, _ in images), side) + more
    found = window_offsets(grid, windows, merge, side)
    assert found.dtype == torch.int32 and found.shape == (windows + 1,)
    assert torch.equal(found.unique_consecutive(), expected)
    assert int(found[-1]) == cells * merge**2
    assert int((found[1:] - found[:-1]).max()) <= (side * merge) ** 2


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


@settings(max_examples=100)
@given(st.one_of(images, grids), padding, unused_rows, dtypes)
def test_the_embedding_is_bridges_bit_for_bit_its_gradient_up_to_the_order_of_frames(grid, spare, spare_rows, dtype):
    (embedded, found), (expected_embedding, expected) = both_ways(grid, spare, spare_rows, dtype)
    assert torch.equal(embedded[: count(grid)], expected_embedding)
    assert not embedded[count(grid) :].any()
    rounding = torch.finfo(dtype).eps
    assert torch.isfinite(found).all() and (torch.equal(found, expected) or any(frames > 1 for frames, _, _ in grid))
    assert (found - expected).float().norm() <= 2 * rounding * expected.float().norm()
