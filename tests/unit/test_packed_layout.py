"""Rows, offsets, indices and angles of packs in the buffers of a bucket."""

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd, _apply_rotary_pos_emb_thd
from megatron.core.packed_seq_params import PackedSeqParams

from bridge_cg_plugin.graphs.host_copies import HostCopies
from bridge_cg_plugin.graphs.rows import copies, fill_segments, write_each, write_offsets, write_rows
from bridge_cg_plugin.language.packed.batch import (
    MOST_SHAPES,
    OFFSETS,
    PADDED_OFFSETS,
    ROW_UNIT,
    PackedBatchError,
    document_indices,
    pack_batch,
    row_lengths,
    spread,
    token_angles,
)
from bridge_cg_plugin.upstream.decoder.block import TransformerBlockFamily, takes_longest
from bridge_cg_plugin.upstream.decoder.layers import packed_params
from bridge_cg_plugin.upstream.wrappers import MAX_SEQLENS

from .packs import ends

documents = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)
WIDTH = 6


def angles_table(rows):
    return (torch.arange(rows)[:, None] * torch.tensor([1.0, 0.3, 0.05] * 2))[:, None, None, :]


ranks_of = st.sampled_from([(size, rank) for size in (1, 2, 3) for rank in range(size)])


@given(documents, st.integers(0, 40))
def test_indices_are_what_megatron_core_finds(lengths, padding):
    tokens = sum(lengths) + padding
    params = PackedSeqParams(cu_seqlens_q=ends(lengths), total_tokens=tokens)
    assert torch.equal(document_indices(ends(lengths), tokens), params.seq_idx)


@given(documents, st.integers(0, 9), st.none() | st.integers(0, 40))
def test_offsets_are_the_batchs_then_documents_of_no_tokens_or_one_to_the_end(lengths, room, padding):
    offsets, end = ends(lengths), sum(lengths) + (padding or 0)
    room += padding is not None
    buffer = torch.full((len(offsets) + room,), -7, dtype=torch.int32)
    write_offsets(buffer, offsets, *[] if padding is None else [end])
    assert buffer.tolist() == offsets.tolist() + [end] * room


@given(st.integers(1, 300_000), st.floats(0, 1))
def test_rows_are_padded_by_at_most_half_to_a_few_lengths(longest, part):
    lengths, row = row_lengths(longest), max(1, round(longest * part))
    assert len(lengths) <= MOST_SHAPES and list(lengths) == sorted({*lengths}) and lengths[-1] == longest
    padded = next(each for each in lengths if each >= row)
    assert padded == lengths[0] or padded < 1.5 * row + ROW_UNIT
    assert all(each % ROW_UNIT == 0 for each in lengths[:-1])


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 9))
def test_example_documents_fill_the_tokens(tokens, largest, more):
    count = -(-tokens // largest) + more
    buffer = torch.full((count,), -7, dtype=torch.int32)
    fill_segments(buffer, tokens, largest)
    lengths = buffer.diff().tolist()
    assert buffer[0] == 0 and buffer[-1] == tokens and min(lengths) >= 0 and max(lengths) <= largest


UNFUSED = SimpleNamespace(per_position=True, _decoder=SimpleNamespace(config=SimpleNamespace(apply_rope_fusion=False)))


@given(documents, st.integers(0, 9), st.integers(0, 20), st.integers(0, 60), st.integers(0, 60), ranks_of)
def test_angles_rotate_as_upstream_does_to_the_last_bit(lengths, repeats, padding, more_rows, longer, group):
    """Also where the table has a row for every token of the pack, which upstream takes in another way."""
    (size, rank), unit = group, 2 * group[0] if group[0] > 1 else 1
    lengths = [unit * n for n in lengths]
    tokens, rows = sum(lengths), max(lengths) + more_rows
    longest, takes = dict.fromkeys(MAX_SEQLENS, max(lengths) + longer), takes_longest()
    by_place = TransformerBlockFamily.by_place(UNFUSED, rows, tokens, longest)
    assume(not by_place or rows >= tokens)  # others run eager
    here, told = tokens // size, {"max_seqlen": max(longest.values())} if takes else {}
    generator = torch.Generator().manual_seed(tokens)
    t = torch.randn(here, 2, WIDTH, generator=generator).to(torch.bfloat16)
    group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    expected = _apply_rotary_pos_emb_thd(t, ends(lengths), angles_table(rows), cp_group=group, **told)
    capacity = tokens + unit * padding
    table = torch.zeros(capacity, 1, 1, WIDTH)
    table[: min(rows, capacity)] = angles_table(rows)[:capacity]
    found = token_angles(table, torch.tensor([by_place]), ends(lengths, repeats), size, rank)
    assert found.shape[0] == capacity // size
    assert torch.equal(_apply_rotary_pos_emb_bshd(t[:, None], found[:here])[:, 0], expected)
    assert not found[here:].any()


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 3))
def test_features_are_spread_to_the_marked_tokens(marks, rows):
    """Also where there are none: a rank whose tokens are no image's takes part in a sum of gradients."""
    mask = torch.tensor(marks).repeat(rows).roll(1).view(rows, -1)
    features = torch.randn(int(mask.sum()), 3, requires_grad=True)
    found = spread(mask, features)
    expected = torch.zeros(rows, len(marks), 3)
    expected[mask] = features.detach()
    assert torch.equal(found, expected.transpose(0, 1))
    weights = torch.randn(rows, len(marks), 3)
    (gradient,) = torch.autograd.grad((found.transpose(0, 1) * weights).sum(), features)
    assert torch.equal(gradient, weights[mask])


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


@pytest.mark.parametrize("names", [OFFSETS, (*OFFSETS, *PADDED_OFFSETS)], ids=["filled", "with padding"])
def test_padding_between_documents_is_told(names):
    """Transformer Engine before 2.18 reads the device to find it."""
    recorded = packed_params(SimpleNamespace(offsets=dict.fromkeys(names, ends([5, 7])), longest=7))
    assert recorded.pad_between_seqs is (True if names != OFFSETS else None)


TOKENS = 12


def ends_at(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def packed(offsets=None, tokens=TOKENS, kv=None, padded=None, longest=TOKENS, shards=1, ranks=1):
    offsets = ends_at(0, 5, TOKENS) if offsets is None else offsets
    values = dict(zip(OFFSETS, (offsets, offsets if kv is None else kv), strict=True))
    values |= dict.fromkeys(PADDED_OFFSETS, padded)
    hidden = torch.zeros(tokens // (shards * ranks), 1, 4)
    longest = {} if longest is None else {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    return pack_batch(hidden, torch.zeros(tokens, 1, 1, 2), values, longest, HostCopies().values, shards, ranks)


BAD = {
    "does not start at 0": ({"offsets": ends_at(1, 5, 12)}, "cu_seqlens_q starts at 1: it must be 0"),
    "decreases": ({"offsets": ends_at(0, 7, 5, 12)}, "cu_seqlens_q[2]=5 after 7"),
    "too long": ({"offsets": ends_at(0, 5, 13)}, "cu_seqlens_q ends at 13, the pack has 12 tokens"),
    "dtype": ({"offsets": ends_at(0, 5, 12, dtype=torch.int64)}, "torch.int64: it must be torch.int32"),
    "device": ({"offsets": ends_at(0, 5, 12).to("meta")}, "is on meta, the tokens are on cpu"),
    "shape": ({"offsets": ends_at(0, 5, 12)[None]}, "has shape (1, 3)"),
    "empty": ({"offsets": ends_at(0, 0)}, "the pack is empty"),
    "no offset": ({"offsets": ends_at()}, "has shape (0,)"),
    "counts": ({"kv": ends_at(0, 12)}, "cu_seqlens_q 3, cu_seqlens_kv 2"),
    "padding": ({"padded": ends_at(0, 4, 12)}, "document 0 has 5 tokens in cu_seqlens_q and room for 4"),
    "padded too long": ({"padded": ends_at(0, 6, 14)}, "cu_seqlens_q_padded ends at 14"),
    "bound": ({"longest": 6}, "max_seqlen_q=6, a document has 7 tokens"),
    "chunks": ({"ranks": 2}, "document 0 has 5 tokens in cu_seqlens_q: it must be a multiple of 4"),
    "padded bound": (
        {"offsets": ends_at(0, 5, 10), "padded": ends_at(0, 5, 12), "longest": 6},
        "max_seqlen_q=6, a document has 7 tokens",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_offsets_are_refused(case):
    arguments, message = BAD[case]
    with pytest.raises(PackedBatchError, match=re.escape(message)):
        packed(**arguments)


def test_what_a_pack_is():
    batch = packed(ends_at(0, 4, 9), padded=ends_at(0, 5, 12))
    assert (batch.lengths, batch.tokens) == ((5, 7), 12)
    assert tuple(batch.offsets) == (*OFFSETS, *PADDED_OFFSETS)
    assert tuple(packed().offsets) == OFFSETS


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(lambda n: n[-1] > 0), st.integers(0, 6))
def test_repeated_offsets_at_the_end_are_no_documents(lengths, repeats):
    batch = packed(ends(lengths, repeats), tokens=sum(lengths) + 3, longest=None)
    assert batch.lengths == tuple(lengths)
    assert all(torch.equal(offsets, ends(lengths)) for offsets in batch.offsets.values())


def test_tokens_and_documents_are_counted_before_ranks_share_them():
    assert packed(shards=2).tokens == TOKENS
    batch = packed(ends_at(0, 3, 8), padded=ends_at(0, 4, 12), ranks=2)
    assert (batch.hidden.shape[0], batch.tokens, batch.lengths) == (6, TOKENS, (4, 8))
