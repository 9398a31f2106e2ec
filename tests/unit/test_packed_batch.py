import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.graphs.host_copies import HostCopies
from bridge_cg_plugin.language.packed.batch import OFFSETS, PADDED_OFFSETS, PackedBatchError, pack_batch

TOKENS = 12


def offsets_of(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def packed(offsets=None, tokens=TOKENS, kv=None, padded=None, longest=TOKENS, shards=1, ranks=1):
    offsets = offsets_of(0, 5, TOKENS) if offsets is None else offsets
    values = dict(zip(OFFSETS, (offsets, offsets if kv is None else kv), strict=True))
    values |= dict.fromkeys(PADDED_OFFSETS, padded)
    hidden = torch.zeros(tokens // (shards * ranks), 1, 4)
    longest = {} if longest is None else {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    return pack_batch(hidden, torch.zeros(tokens, 1, 1, 2), values, longest, HostCopies().values, shards, ranks)


BAD = {
    "does not start at 0": (packed, {"offsets": offsets_of(1, 5, 12)}, "cu_seqlens_q starts at 1: it must be 0"),
    "decreases": (packed, {"offsets": offsets_of(0, 7, 5, 12)}, "cu_seqlens_q[2]=5 after 7"),
    "too long": (packed, {"offsets": offsets_of(0, 5, 13)}, "cu_seqlens_q ends at 13, the pack has 12 tokens"),
    "dtype": (packed, {"offsets": offsets_of(0, 5, 12, dtype=torch.int64)}, "torch.int64: it must be torch.int32"),
    "device": (packed, {"offsets": offsets_of(0, 5, 12).to("meta")}, "is on meta, the tokens are on cpu"),
    "shape": (packed, {"offsets": offsets_of(0, 5, 12)[None]}, "has shape (1, 3)"),
    "empty": (packed, {"offsets": offsets_of(0, 0)}, "the pack is empty"),
    "no offset": (packed, {"offsets": offsets_of()}, "has shape (0,)"),
    "counts": (packed, {"kv": offsets_of(0, 12)}, "cu_seqlens_q 3, cu_seqlens_kv 2"),
    "padding": (packed, {"padded": offsets_of(0, 4, 12)}, "document 0 has 5 tokens in cu_seqlens_q and room for 4"),
    "padded too long": (packed, {"padded": offsets_of(0, 6, 14)}, "cu_seqlens_q_padded ends at 14"),
    "bound": (packed, {"longest": 6}, "max_seqlen_q=6, a document has 7 tokens"),
    "chunks": (packed, {"ranks": 2}, "document 0 has 5 tokens in cu_seqlens_q: it must be a multiple of 4"),
    "padded bound": (
        packed,
        {"offsets": offsets_of(0, 5, 10), "padded": offsets_of(0, 5, 12), "longest": 6},
        "max_seqlen_q=6, a document has 7 tokens",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_offsets_are_refused(case):
    make, arguments, message = BAD[case]
    with pytest.raises(PackedBatchError, match=re.escape(message)):
        make(**arguments)


def test_what_a_pack_is():
    batch = packed(offsets_of(0, 4, 9), padded=offsets_of(0, 5, 12))
    assert (batch.lengths, batch.tokens) == ((5, 7), 12)
    assert tuple(batch.offsets) == (*OFFSETS, *PADDED_OFFSETS)
    assert tuple(packed().offsets) == OFFSETS


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(lambda n: n[-1] > 0), st.integers(0, 6))
def test_repeated_offsets_at_the_end_are_no_documents(lengths, repeats):
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longer = torch.cat((ends, ends[-1:].expand(repeats)))
    batch = packed(longer, tokens=int(ends[-1]) + 3, longest=None)
    assert batch.lengths == tuple(lengths)
    assert all(torch.equal(offsets, ends) for offsets in batch.offsets.values())


def test_tokens_are_counted_before_they_are_sharded():
    assert packed(shards=2).tokens == TOKENS
    with pytest.raises(PackedBatchError, match="the pack has 6 tokens"):
        packed(tokens=6)


def test_documents_are_counted_before_ranks_share_them():
    batch = packed(offsets_of(0, 3, 8), padded=offsets_of(0, 4, 12), ranks=2)
    assert (batch.hidden.shape[0], batch.tokens, batch.lengths) == (6, TOKENS, (4, 8))
