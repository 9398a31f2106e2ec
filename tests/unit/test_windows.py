"""The order and the bounds of attention windows, beside Hugging Face's own."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_window_index

from bridge_cg_plugin.vision.layout import (
    most_windows,
    window_offsets,
    window_order,
)

PATCH = 14
merges = st.sampled_from([1, 2, 3])
sides = st.sampled_from([1, 2, 3, 4])
sizes = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4)
spare = st.integers(0, 40)


def case(images, merge, spare_rows=2):
    """Return a grid, the same with unused rows, and how many cells it has."""
    grid = torch.tensor([(t, h * merge, w * merge) for t, h, w in images])
    return grid, torch.cat((grid, grid.new_zeros(spare_rows, 3))), sum(t * h * w for t, h, w in images)


def theirs(grid, merge, side):
    return get_vision_window_index(grid, merge, window_size=side * merge * PATCH, patch_size=PATCH)


@given(sizes, merges, sides, spare)
def test_the_order_is_theirs_and_padding_stays(images, merge, side, more):
    grid, padded, cells = case(images, merge)
    order, place, _ = window_order(padded, cells + more, merge, side)
    expected, _ = theirs(grid, merge, side)
    assert torch.equal(order[:cells], expected)
    assert torch.equal(order[cells:], torch.arange(cells, cells + more))
    assert torch.equal(order[place], torch.arange(cells + more))


@given(sizes, merges, sides, spare)
def test_the_bounds_are_theirs_then_windows_of_no_length(images, merge, side, more):
    grid, padded, cells = case(images, merge)
    _, expected = theirs(grid, merge, side)
    windows = most_windows(cells, sum(t for t, _, _ in images), side) + more
    found = window_offsets(padded, windows, merge, side)
    assert found.dtype == torch.int32 and found.shape == (windows + 1,)
    assert torch.equal(found.unique_consecutive(), expected)
    assert int(found[-1]) == cells * merge**2
    assert int((found[1:] - found[:-1]).max()) <= (side * merge) ** 2
