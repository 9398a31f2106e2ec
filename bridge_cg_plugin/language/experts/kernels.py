"""Triton kernels of experts: rows of a routing map, rows times their expert's weight, gated SiLU, sums by token.

Experts' weights and gradients are found by their distance from the first, so parameters stay where training has them
and nothing is stacked. How many rows an expert has is read on the device; a launch has room for any division of them.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import Table

# Columns that a block takes at once where rows are added up.
COMBINED_COLUMNS = 1024


@triton.jit
def _expert_of(bounds_ptr, experts, tile, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Return a tile's expert, its first row and the expert's end; no expert is `EXPERTS`."""
    number = tl.arange(0, EXPERTS)
    first = tl.load(bounds_ptr + number, mask=number < experts, other=0)
    end = tl.load(bounds_ptr + number + 1, mask=number < experts, other=0)
    tiles = (end - first + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    its = number == expert
    before = tl.sum(tl.where(its, ends - tiles, 0), 0)
    row = tl.sum(tl.where(its, first, 0), 0) + (tile - before) * ROWS
    return expert, row, tl.sum(tl.where(its, end, 0), 0)


@triton.jit
def _matrix(first_ptr, distances_ptr, expert, VECTOR: tl.constexpr):
    """Return where an expert's matrix begins, `VECTOR` elements a multiple of the distance."""
    distance = tl.load(distances_ptr + expert)
    # The compiler loads whole vectors only where it sees that it may.
    return first_ptr + (distance // VECTOR) * VECTOR


@triton.jit
def _multiply(
    x_ptr,
    tokens_ptr,
    weight_ptr,
    distances_ptr,
    bounds_ptr,
    out_ptr,
    experts,
    columns,
    depth,
    GATHERED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    VECTOR: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    across = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) // across
    expert, first, end = _expert_of(bounds_ptr, experts, tile, ROWS, EXPERTS)
    if expert < experts:
        its_ptr = _matrix(weight_ptr, distances_ptr, expert, VECTOR)
        row = first + tl.arange(0, ROWS)
        column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
        inner = tl.arange(0, DEPTH)
        # Rows beyond the end repeat the last one: they are loaded and not stored.
        source = tl.minimum(row, end - 1)
        if GATHERED:
            source = tl.load(tokens_ptr + source)
        x_ptrs = x_ptr + source.to(tl.int64)[:, None] * depth + inner[None, :]
        if TRANSPOSED:  # [depth, columns]
            weight_ptrs = its_ptr + inner[:, None] * columns + column[None, :]
            step = DEPTH * columns
        else:  # [columns, depth]
            weight_ptrs = its_ptr + column[None, :] * depth + inner[:, None]
            step = DEPTH
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in tl.range(0, depth, DEPTH):
            if WHOLE:
                x = tl.load(x_ptrs)
                weight = tl.load(weight_ptrs)
            else:
                inside = start + inner < depth
                x = tl.load(x_ptrs, mask=inside[None, :], other=0.0)
                weight = tl.load(weight_ptrs, mask=inside[:, None] & (column < columns)[None, :], other=0.0)
            total = tl.dot(x, weight, total, input_precision=PRECISION)
            x_ptrs += DEPTH
            weight_ptrs += step
        out_ptrs = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
        stored = (row < end)[:, None]
        if not WHOLE:
            stored = stored & (column < columns)[None, :]
        tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _weight_gradients(
    gradient_ptr,
    gradient_tokens_ptr,
    x_ptr,
    x_tokens_ptr,
    bounds_ptr,
    sum_ptr,
    distances_ptr,
    rows,
    columns,
    GRADIENT_GATHERED: tl.constexpr,
    X_GATHERED: tl.constexpr,
    ADD: tl.constexpr,
    VECTOR: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    expert = tl.program_id(0) // (down * across)
    tile = tl.program_id(0) % (down * across)
    begin = tl.load(bounds_ptr + expert)
    end = tl.load(bounds_ptr + expert + 1)
    if (end > begin) | (not ADD):
        row = (tile // across) * ROWS + tl.arange(0, ROWS)
        column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in tl.range(begin, end, DEPTH):
            summed = start + tl.arange(0, DEPTH)
            inside = summed < end
            of_gradient = tl.minimum(summed, end - 1)
            of_x = of_gradient
            if GRADIENT_GATHERED:
                of_gradient = tl.load(gradient_tokens_ptr + of_gradient)
            if X_GATHERED:
                of_x = tl.load(x_tokens_ptr + of_x)
            gradient_ptrs = gradient_ptr + of_gradient.to(tl.int64)[:, None] * rows + row[None, :]
            x_ptrs = x_ptr + of_x.to(tl.int64)[:, None] * columns + column[None, :]
            # Behind the expert's end one side is zero, the other repeats the last row.
            if WHOLE:
                gradient = tl.load(gradient_ptrs, mask=inside[:, None], other=0.0)
                x = tl.load(x_ptrs)
            else:
                gradient = tl.load(gradient_ptrs, mask=inside[:, None] & (row < rows)[None, :], other=0.0)
                x = tl.load(x_ptrs, mask=(column < columns)[None, :], other=0.0)
            total = tl.dot(tl.trans(gradient), x, total, input_precision=PRECISION)
        out_ptrs = _matrix(sum_ptr, distances_ptr, expert, VECTOR) + row[:, None] * columns + column[None, :]
        if WHOLE:
            if ADD:
                total += tl.load(out_ptrs).to(tl.float32)
            tl.store(out_ptrs, total.to(sum_ptr.dtype.element_ty))
        else:
            stored = (row < rows)[:, None] & (column < columns)[None, :]
            if ADD:
                total += tl.load(out_ptrs, mask=stored, other=0.0).to(tl.float32)
            tl.store(out_ptrs, total.to(sum_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _combine(values_ptr, places_ptr, out_ptr, columns, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for index in tl.static_range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + index).to(tl.int64)
        total += tl.load(values_ptr + place * columns + column, mask=inside & (place >= 0), other=0.0).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * columns + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def multiply(
    x: Tensor,
    tokens: Tensor | None,
    table: Table,
    shape: Sequence[int],
    bounds: Tensor,
    transposed: bool,
) -> Tensor:
    """Return rows times their expert's weight; see `linear.multiply`.

    Args:
        x: `[rows, width]` or `[tokens, width]`, contiguous.
        tokens: `[rows]` int32 or None.
        table: Of the weights, of x's dtype.
        shape: `(out, in)` of a weight.
        bounds: `[experts + 1]` int32.
        transposed: Whether x is `out` wide.
    """
    first, distances, vector = table
    count, experts = x.shape[0] if tokens is None else tokens.shape[0], distances.shape[0]
    depth, columns = shape if transposed else (shape[1], shape[0])
    out = x.new_empty(count, columns)
    constants = tiling_of(x.dtype, count // experts)
    # Every expert may end with a tile that is not full.
    tiles = triton.cdiv(count, constants["ROWS"]) + experts - 1
    _multiply[(tiles * triton.cdiv(columns, constants["COLUMNS"]),)](
        x,
        x if tokens is None else tokens,
        first,
        distances,
        bounds,
        out,
        experts,
        columns,
        depth,
        GATHERED=tokens is not None,
        TRANSPOSED=transposed,
        VECTOR=vector,
        WHOLE=depth % constants["DEPTH"] == 0 and columns % constants["COLUMNS"] == 0,
        PRECISION=_precision(x.dtype),
        EXPERTS=triton.next_power_of_2(experts),
        **constants,
    )
    return out


def weight_gradients(
    gradient: Tensor,
    gradient_tokens: Tensor | None,
    x: Tensor,
    x_tokens: Tensor | None,
    bounds: Tensor,
    table: Table,
    add: bool,
) -> None:
    """Write every expert's weight gradient to its place, or add it there; see `linear.add_weight_gradients`.

    Args:
        gradient: `[rows, out]` or `[tokens, out]`, contiguous.
        x: `[rows, in]` or `[tokens, in]`, contiguous.
        gradient_tokens, x_tokens: `[rows]` int32 or None.
        bounds: `[experts + 1]` int32.
        table: Of `[out, in]` each.
        add: Whether what is there counts; an expert without rows then stays as it is.
    """
    first, distances, vector = table
    rows, columns, experts = gradient.shape[1], x.shape[1], distances.shape[0]
    constants = tiling_of_gradients(x.dtype)
    tiles = triton.cdiv(rows, constants["ROWS"]) * triton.cdiv(columns, constants["COLUMNS"])
    _weight_gradients[(experts * tiles,)](
        gradient,
        gradient if gradient_tokens is None else gradient_tokens,
        x,
        x if x_tokens is None else x_tokens,
        bounds,
        first,
        distances,
        rows,
        columns,
        GRADIENT_GATHERED=gradient_tokens is not None,
        X_GATHERED=x_tokens is not None,
        ADD=add,
        VECTOR=vector,
        WHOLE=rows % constants["ROWS"] == 0 and columns % constants["COLUMNS"] == 0,
        PRECISION=_precision(x.dtype),
        **constants,
    )


def combine(values: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of each token's rows, `[tokens, width]` of a type; see `linear.combine`."""
    (tokens, top_k), columns = places.shape, values.shape[1]
    out = values.new_empty(tokens, columns, dtype=dtype)
    _combine[(tokens, triton.cdiv(columns, COMBINED_COLUMNS))](
        values, places, out, columns, TOP_K=top_k, COLUMNS=COMBINED_COLUMNS, num_warps=4
    )
    return out


def tiling(rows: int, columns: int, depth: int, warps: int, stages: int) -> dict[str, int]:
    """Return how a product is divided, as a kernel's constants.

    Args:
        rows, columns: Of a tile of the result.
        depth: Elements summed at once.
        warps: Of a block.
        stages: Loads under way.
    """
    return {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "num_warps": warps, "num_stages": stages}


def tiling_of(dtype: torch.dtype, usual: int) -> dict[str, int]:
    """Return the tiling of a product.

    Args:
        dtype: Of both sides.
        usual: Rows of an expert if all had as many.
    """
    if dtype is torch.float32:
        return tiling(64, 64, 32, 4, 2)
    return tiling(128, 256, 64, 8, 4) if usual >= 256 else tiling(128, 128, 64, 4, 4)


def tiling_of_gradients(dtype: torch.dtype) -> dict[str, int]:
    """Return the tiling of weight gradients."""
    return tiling(64, 64, 32, 4, 2) if dtype is torch.float32 else tiling(128, 128, 64, 4, 4)


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype is torch.float32 else "tf32"  # of no effect on 16 bits


# Elements of a routing map, or of counts, that a block holds at once, and its fewest tokens.
HELD, LEAST_TOKENS = 4096, 16


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
    room,
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
    is_chosen = chosen > 0
    rows = tl.where(is_chosen & (rows < room), rows, -1)
    entry = token[:, None] * experts + expert[None, :]
    tl.store(rows_of_ptr + entry, rows, mask=(token < tokens)[:, None] & (expert < experts)[None, :])
    tl.store(tokens_ptr + rows, tl.broadcast_to(token[:, None], (TOKENS, EXPERTS)), mask=rows >= 0)
    tl.store(entries_ptr + rows, entry, mask=rows >= 0)
    among = tl.cumsum(chosen, 1) - chosen
    tl.store(places_ptr + token[:, None] * TOP_K + among, rows, mask=is_chosen)
    its = tl.sum(chosen, 1)
    for index in tl.static_range(TOP_K):
        nowhere = tl.zeros((TOKENS,), dtype=tl.int32) - 1
        tl.store(places_ptr + token * TOP_K + index, nowhere, mask=(its <= index) & (token < tokens))
    if number == 0:
        tl.store(bounds_ptr, 0)
        tl.store(bounds_ptr + 1 + expert, ends, mask=expert < experts)


def find_rows(routing_map: Tensor, used: Tensor, top_k: int, room: int) -> tuple[Tensor, ...]:
    """Return the fields of `Rows`; of rows behind the last bound, only entries are written: zeros.

    Args:
        routing_map, used, top_k: See `rows.find_rows`.
        room: How many rows there are.
    """
    tokens, experts = routing_map.shape

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=routing_map.device)

    wide = triton.next_power_of_2(experts)
    held = max(HELD // wide, LEAST_TOKENS)
    blocks = triton.cdiv(tokens, held)
    of_map = (routing_map.contiguous().view(torch.uint8), used)
    counts, bounds, rows = new(blocks, experts), new(experts + 1), (new(room), new(room).zero_())
    places, rows_of = new(tokens, top_k), new(tokens, experts)
    sizes = {"TOKENS": held, "EXPERTS": wide, "num_warps": 4}
    _count[(blocks,)](*of_map, counts, tokens, experts, **sizes)
    made = (counts, bounds, *rows, places, rows_of)
    _place[(blocks,)](*of_map, *made, blocks, tokens, experts, room, TOP_K=top_k, BLOCKS=held, **sizes)
    return bounds, *rows, places, rows_of


# Columns that a block takes at once.
MOST_COLUMNS = 2048


@triton.jit
def _swiglu(inner_ptr, weights_ptr, bounds_ptr, out_ptr, experts, columns, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(bounds_ptr + experts):
        weight = tl.load(weights_ptr + row).to(tl.float32)
        for start in tl.range(0, columns, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < columns
            gate = tl.load(inner_ptr + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
            linear = tl.load(inner_ptr + (row * 2 + 1) * columns + column, mask=inside, other=0.0).to(tl.float32)
            out = gate * tl.sigmoid(gate) * linear * weight
            tl.store(out_ptr + row * columns + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(
    gradient_ptr,
    inner_ptr,
    weights_ptr,
    bounds_ptr,
    inner_gradient_ptr,
    weights_gradient_ptr,
    experts,
    columns,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(bounds_ptr + experts):
        weight = tl.load(weights_ptr + row).to(tl.float32)
        total = tl.zeros((COLUMNS,), dtype=tl.float32)
        for start in tl.range(0, columns, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            inside = column < columns
            gradient = tl.load(gradient_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(inner_ptr + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
            linear = tl.load(inner_ptr + (row * 2 + 1) * columns + column, mask=inside, other=0.0).to(tl.float32)
            open_share = tl.sigmoid(gate)
            opened = gate * open_share
            total += gradient * opened * linear
            gradient *= weight
            of_gate = gradient * linear * (open_share + opened * (1.0 - open_share))
            kind = inner_gradient_ptr.dtype.element_ty
            tl.store(inner_gradient_ptr + row * 2 * columns + column, of_gate.to(kind), mask=inside)
            tl.store(inner_gradient_ptr + (row * 2 + 1) * columns + column, (gradient * opened).to(kind), mask=inside)
        tl.store(weights_gradient_ptr + row, tl.sum(total, 0).to(weights_gradient_ptr.dtype.element_ty))


def swiglu(inner: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
    """Return `silu(gate) * linear * weight` of every row, `[rows, width]`; rows behind the last bound hold anything.

    Args:
        inner: `[rows, 2 * width]`, contiguous: the gate, then what it lets through.
        weights: `[rows]`.
        bounds: `[experts + 1]` int32.
    """
    rows, columns = inner.shape[0], inner.shape[1] // 2
    out = inner.new_empty(rows, columns)
    sides, across = (inner, weights, bounds, out), _columns_of(columns)
    _swiglu[(rows,)](*sides, bounds.shape[0] - 1, columns, COLUMNS=across, num_warps=4)
    return out


def swiglu_backward(gradient: Tensor, inner: Tensor, weights: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `swiglu`'s first two arguments.

    Args:
        gradient: `[rows, width]`, contiguous.
        inner, weights, bounds: See `swiglu`.
    """
    rows, columns = gradient.shape
    of_inner, of_weights = torch.empty_like(inner), torch.empty_like(weights)
    sides = (gradient, inner, weights, bounds, of_inner, of_weights)
    _swiglu_backward[(rows,)](*sides, bounds.shape[0] - 1, columns, COLUMNS=_columns_of(columns), num_warps=4)
    return of_inner, of_weights


def _columns_of(columns: int) -> int:
    whole: int = triton.next_power_of_2(columns)
    return min(whole, MOST_COLUMNS)
