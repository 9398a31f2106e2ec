"""Real rows at the head of longer buffers."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.graphs.rows import copies, write_each, write_rows

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])
# Rows of a tensor and of the buffer that it goes into; no tensor for None.
SIZES = st.tuples(st.none() | st.integers(0, 5), st.integers(1, 5)).filter(lambda s: s[0] is None or s[0] <= s[1])


def dirty(rows, dtype):
    return torch.full((rows, 3), torch.nan if dtype.is_floating_point else -7, dtype=dtype)


def filled(rows, dtype):
    return torch.arange(1, 3 * rows + 1).view(rows, 3).to(dtype)


@given(size=SIZES, dtype=DTYPES, of=DTYPES)
def test_rows_are_converted_and_the_rest_is_zeroed(size, dtype, of):
    count, room = size[0] or 0, size[1]
    buffer = dirty(room, dtype)
    write_rows(buffer, filled(count, of))
    assert torch.equal(buffer[:count], filled(count, dtype))
    assert not buffer[count:].any()


@given(sizes=st.lists(st.tuples(SIZES, DTYPES), max_size=5))
def test_several_tensors_at_once_are_written_as_one_by_one(sizes):
    buffers = [dirty(room, dtype) for (_, room), dtype in sizes]
    rows = [None if count is None else filled(count, dtype) for (count, _), dtype in sizes]
    write_each(buffers, rows)
    for buffer, given_rows in zip(buffers, rows, strict=True):
        expected = torch.zeros_like(buffer)
        write_rows(expected, expected[:0] if given_rows is None else given_rows)
        assert torch.equal(buffer, expected)


@given(sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), DTYPES), max_size=4))
def test_copies_have_memory_of_their_own(sizes):
    tensors = [filled(count + more, dtype) for count, more, dtype in sizes]
    made = copies(tensors, [count for count, _, _ in sizes])
    for tensor in tensors:
        tensor.zero_()
    for copy, (count, _, dtype) in zip(made, sizes, strict=True):
        assert torch.equal(copy, filled(count, dtype)) and copy.is_contiguous() and not copy._is_view()
