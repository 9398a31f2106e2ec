"""Which packs a bucket takes: what the runtime and the planner ask. Imports no torch."""

from collections.abc import Iterable, Sequence

from ...attention_bounds import segment_limits
from ...graphs.fallback import Fallback
from ...graphs.planning.buckets import Bucket


def pack_buckets(capacities: Iterable[int], documents: int) -> list[Bucket]:
    """Return what is recorded for these capacities, with the limits (documents, tokens of the longest document).

    Args:
        capacities: Tokens.
        documents: Most documents of a pack.
    """
    return list(dict.fromkeys(bucket for c in capacities for bucket in _buckets_of(c, documents)))


def _buckets_of(capacity: int, documents: int) -> Iterable[Bucket]:
    for most, bound in segment_limits(capacity, min(documents, capacity)):
        yield Bucket(capacity, (most, bound))


def refuse_pack(
    lengths: Sequence[int], tokens: int, exact_below: int, bucket: Bucket, shards: int = 1, ranks: int = 1
) -> Fallback | None:
    """Return why a pack may not use a bucket that has room for its tokens, or None if it may.

    Args:
        lengths: Tokens of every document, with their padding.
        tokens: Tokens of the pack, at least the sum of `lengths`.
        exact_below: Packs of up to this many tokens on a rank must fill a bucket exactly.
        bucket: Has the limits (documents, tokens of the longest document).
        shards: Ranks that hold a part of the tokens each (sequence parallelism).
        ranks: Ranks that hold two chunks of every document each (context parallelism): padding is a document there.
    """
    documents, longest = bucket.limits
    if len(lengths) > documents:
        return Fallback.TOO_MANY_DOCUMENTS
    padding = bucket.tokens - sum(lengths) if ranks > 1 else 0
    if max(max(lengths), padding) > longest:
        return Fallback.DOCUMENT_TOO_LONG
    if tokens != bucket.tokens:
        if shards > 1:
            return Fallback.SHARDED_TOKENS
        if tokens <= exact_below * ranks:
            return Fallback.TOO_FEW_TOKENS
    return None
