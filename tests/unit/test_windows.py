"""The order and the bounds of attention windows, beside Hugging Face's own."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from bridge_cg_plugin.vision.layout import (
    most_windows,
    permuted,
    segment_offsets,
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
def test_positions_are_theirs_in_the_order_of_windows(images, merge, side, more):
    grid, padded, cells = case(images, merge)
    _, _, found = window_order(padded, cells + more, merge, side)
    index, _ = theirs(grid, merge, side)
    expected = get_vision_position_ids(grid, merge).view(cells, merge * merge, 2)[index].view(-1, 2)
    assert torch.equal(found[: len(expected)], expected)
    assert found.shape[0] == (cells + more) * merge**2 and not found[len(expected) :].any()


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


@given(sizes, sides)
def test_no_batch_has_more_windows_than_most_windows(images, side):
    grid, _, cells = case(images, 1)
    _, expected = theirs(grid, 1, side)
    assert len(expected) - 1 <= most_windows(cells, sum(t for t, _, _ in images), side)


@given(sizes, merges)
def test_frames_bounds_are_theirs(images, merge):
    grid, padded, _ = case(images, merge)
    found = segment_offsets(padded, sum(t for t, _, _ in images) + 3)
    assert torch.equal(found[:-3], get_vision_cu_seqlens(grid))


def test_a_permutation_and_its_gradient_are_those_of_indexing():
    rows = torch.randn(6, 3, requires_grad=True)
    order = torch.tensor([4, 0, 5, 1, 3, 2])
    weight = torch.randn(6, 3)
    found = permuted(rows, order, torch.argsort(order))
    assert torch.equal(found, rows[order])
    expected = torch.autograd.grad((rows[order] * weight).sum(), rows)
    assert torch.equal(torch.autograd.grad((found * weight).sum(), rows)[0], expected[0])
