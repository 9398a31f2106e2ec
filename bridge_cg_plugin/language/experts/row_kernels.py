"""Triton kernels that find the rows of experts from a routing map, and move a number for each row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a routing map, or of counts, that a block holds at once.
HELD = 4096
LEAST_TOKENS = 16
MOVED = 1024


@triton.jit
def _chosen(map_ptr, used_ptr, tokens, experts, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """Return a block of the map without padding, `[TOKENS, EXPERTS]` int32, its tokens and the experts."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERTS)
    real = (token < tl.minimum(tl.load(used_ptr), tokens))[:, None] & (expert < experts)[None, :]
    chosen = tl.load(map_ptr + token[:, None] * experts + expert[None, :], mask=real, other=0)
    return (chosen != 0).to(tl.int32), token, expert


@triton.jit
def _count(map_ptr, used_ptr, counts_ptr, tokens, experts, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    chosen, token, expert = _chosen(map_ptr, used_ptr, tokens, experts, TOKENS, EXPERTS)
    tl.store(counts_ptr + tl.program_id(0) * experts + expert, tl.sum(chosen, 0), mask=expert < experts)


@triton.jit
def _place(
    map_ptr,
    used_ptr,
    counts_ptr,
    bounds_ptr,
    tokens_ptr,
    entries_ptr,
    places_ptr,
    rows_of_ptr,
    blocks,
    tokens,
    experts,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    number = tl.program_id(0)
    chosen, token, expert = _chosen(map_ptr, used_ptr, tokens, experts, TOKENS, EXPERTS)
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    before = tl.zeros((EXPERTS,), dtype=tl.int32)
    for start in tl.range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        there = (block < blocks)[:, None] & (expert < experts)[None, :]
        counts = tl.load(counts_ptr + block[:, None] * experts + expert[None, :], mask=there, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((block < number)[:, None], counts, 0), 0)
    ends = tl.cumsum(total, 0)
    rows = (ends - total + before)[None, :] + tl.cumsum(chosen, 0) - chosen
    entry = token[:, None] * experts + expert[None, :]
    inside = (token < tokens)[:, None] & (expert < experts)[None, :]
    is_chosen = chosen > 0
    tl.store(rows_of_ptr + entry, tl.where(is_chosen, rows, -1), mask=inside)
    tl.store(tokens_ptr + rows, tl.broadcast_to(token[:, None], (TOKENS, EXPERTS)), mask=is_chosen)
    tl.store(entries_ptr + rows, entry, mask=is_chosen)
    among = tl.cumsum(chosen, 1) - chosen
    tl.store(places_ptr + token[:, None] * TOP_K + among, rows, mask=is_chosen)
    its = tl.sum(chosen, 1)
    for index in tl.static_range(TOP_K):
        nowhere = tl.zeros((TOKENS,), dtype=tl.int32) - 1
        tl.store(places_ptr + token * TOP_K + index, nowhere, mask=(its <= index) & (token < tokens))
    if number == 0:
        tl.store(bounds_ptr, 0)
        tl.store(bounds_ptr + 1 + expert, ends, mask=expert < experts)


@triton.jit
def _take_rows(values_ptr, entries_ptr, bounds_ptr, out_ptr, experts, COUNT: tl.constexpr):
    row = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    inside = row < tl.load(bounds_ptr + experts)
    entry = tl.load(entries_ptr + row, mask=inside, other=0)
    tl.store(out_ptr + row, tl.load(values_ptr + entry, mask=inside), mask=inside)


@triton.jit
def _spread_rows(values_ptr, rows_of_ptr, out_ptr, count, COUNT: tl.constexpr):
    entry = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    inside = entry < count
    row = tl.load(rows_of_ptr + entry, mask=inside, other=-1)
    tl.store(out_ptr + entry, tl.load(values_ptr + row, mask=row >= 0, other=0.0), mask=inside)


def find_rows(routing_map: Tensor, used: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Rows`; rows behind the last bound are not written.

    Args:
        routing_map: `[tokens, experts]` bool, at most `top_k` in a row.
        used: `[1]` int32.
        top_k: Experts of a token.
    """
    tokens, experts = routing_map.shape

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=routing_map.device)

    wide = triton.next_power_of_2(experts)
    held = max(HELD // wide, LEAST_TOKENS)
    blocks = triton.cdiv(tokens, held)
    of_map = (routing_map.contiguous().view(torch.uint8), used)
    counts, bounds, rows = new(blocks, experts), new(experts + 1), (new(tokens * top_k), new(tokens * top_k))
    places, rows_of = new(tokens, top_k), new(tokens, experts)
    sizes = {"TOKENS": held, "EXPERTS": wide, "num_warps": 4}
    _count[(blocks,)](*of_map, counts, tokens, experts, **sizes)
    made = (counts, bounds, *rows, places, rows_of)
    _place[(blocks,)](*of_map, *made, blocks, tokens, experts, TOP_K=top_k, BLOCKS=held, **sizes)
    return bounds, *rows, places, rows_of


def take_rows(values: Tensor, entries: Tensor, bounds: Tensor) -> Tensor:
    """Return a value for every row, `[rows]`; rows behind the last bound are not written.

    Args:
        values: `[tokens, experts]`, contiguous.
        entries: See `Rows`.
        bounds: See `Rows`.
    """
    out = values.new_empty(entries.shape[0])
    experts = bounds.shape[0] - 1
    _take_rows[(triton.cdiv(out.shape[0], MOVED),)](values, entries, bounds, out, experts, COUNT=MOVED)
    return out


def spread_rows(values: Tensor, rows_of: Tensor) -> Tensor:
    """Return each token's value for each expert, `[tokens, experts]`; zero where it has no row.

    Args:
        values: `[rows]`, contiguous.
        rows_of: See `Rows`.
    """
    out = torch.empty_like(rows_of, dtype=values.dtype)
    _spread_rows[(triton.cdiv(out.numel(), MOVED),)](values, rows_of, out, out.numel(), COUNT=MOVED)
    return out
