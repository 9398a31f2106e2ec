"""Attention in segments whose keys PyTorch splits where it attends in each segment alone: the same bits, packed.

One short segment does not fill a GPU, so PyTorch's flash attention computes parts of its keys side by side and combines
them. In packed segments it never does. What is here computes those segments again, and adds in the same order: four
lanes hold the sums of a row, as the tensor cores' results lie, and parts are combined as FlashAttention 2 does
(`combine_attn_seqk_parallel` in its `flash_fwd_kernel.h`).
"""

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ...announce import announce
from .flash_operator import flash_forward
from .key_parts import block_of, parts_by_length
from .launch import launch, tried

ROWS, WARPS = 32, 2
LOG2_E = 1.4426950408889634074


@cache
def _parts(heads: int, width: int, device: torch.device) -> tuple[Tensor, int]:
    """Return `parts_by_length` on a device, int32, and the most parts."""
    found = parts_by_length(heads, width, torch.cuda.get_device_properties(device).multi_processor_count)
    return torch.tensor(found, dtype=torch.int32, device=device), max(found)


@triton.jit
def exp(x):
    """Return e to the power of fp32 values as CUDA's `expf` rounds it."""
    return libdevice.exp(x)


@triton.jit
def log(x):
    """Return the logarithm of fp32 values as CUDA's `logf` rounds it."""
    return libdevice.log(x)


@triton.jit
def fast_log(x):
    """Return the logarithm of fp32 values as CUDA's `__logf` rounds it."""
    return libdevice.fast_logf(x)


@triton.jit
def _add(sums, shrunk, x, ROWS: tl.constexpr, N: tl.constexpr, FIRST: tl.constexpr):
    """Add x `[ROWS, 4, N, 2]` to sums `[ROWS, 4]` one after the other; the first of all scales the sums."""
    if N > 1:
        low, high = tl.split(tl.permute(tl.reshape(x, [ROWS, 4, 2, N // 2, 2]), (0, 1, 3, 4, 2)))
        return _add(_add(sums, shrunk, low, ROWS, N // 2, FIRST), shrunk, high, ROWS, N // 2, False)
    else:
        first, second = tl.split(tl.reshape(x, [ROWS, 4, 2]))
        if FIRST:
            return tl.fma(sums, tl.broadcast_to(shrunk[:, None], sums.shape), first) + second
        else:
            return sums + first + second


@triton.jit
def _add_lanes(sums, ROWS: tl.constexpr):
    near, far = tl.split(tl.permute(tl.reshape(sums, [ROWS, 2, 2]), (0, 2, 1)))
    first, second = tl.split(near + far)
    return first + second


@triton.jit
def _butterfly(x, ROWS: tl.constexpr, N: tl.constexpr):
    """Add N values of each row as lanes exchange them: those farthest apart first."""
    if N == 1:
        return tl.reshape(x, [ROWS])
    else:
        low, high = tl.split(tl.permute(tl.reshape(x, [ROWS, 2, N // 2]), (0, 2, 1)))
        return _butterfly(low + high, ROWS, N // 2)


@triton.jit
def _attend_to_part(
    query, k_ptr, v_ptr, part, parts, length, k_stride, v_stride, scale_log2,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Attend to a part's blocks of keys, the last one first, as PyTorch does.

    Returns:
        The largest product and the sum of the weights of each row, and where VALUES is true the weighted values.
    """
    blocks = tl.cdiv(length, KEYS)
    each = tl.cdiv(blocks, parts)
    last = tl.minimum(blocks, (part + 1) * each)
    sums, largest = tl.zeros([ROWS, 4], tl.float32), tl.full([ROWS], float("-inf"), tl.float32)
    values, columns = tl.zeros([ROWS, COLUMNS], tl.float32), tl.arange(0, COLUMNS)
    for back in range(last - part * each):
        keys = (last - 1 - back) * KEYS + tl.arange(0, KEYS)
        inside = (keys < length)[:, None] & (columns < WIDTH)[None, :]
        key = tl.load(k_ptr + keys[:, None] * k_stride + columns[None, :], mask=inside, other=0.0)
        products = tl.dot(query, tl.trans(key))
        products = tl.where((keys < length)[None, :], products, float("-inf"))
        now = tl.maximum(largest, tl.max(products, 1))
        shrunk = tl.where(largest == float("-inf"), 0.0, tl.exp2((largest - now) * scale_log2))
        weights = tl.exp2(products * scale_log2 - (now * scale_log2)[:, None])
        split = tl.permute(tl.reshape(weights, [ROWS, KEYS // 8, 4, 2]), (0, 2, 1, 3))
        sums = _add(sums, shrunk, split, ROWS, KEYS // 8, True)
        if VALUES:
            value = tl.load(v_ptr + keys[:, None] * v_stride + columns[None, :], mask=inside, other=0.0)
            values = tl.dot(weights.to(value.dtype), value, values * shrunk[:, None])
        largest = now
    return largest, _add_lanes(sums, ROWS), values


@triton.jit(do_not_specialize=["known", "rows"])
def _split_keys(
    q_ptr, k_ptr, v_ptr, out_ptr, logsumexp_ptr, offsets_ptr, parts_ptr, known, q_stride, k_stride, v_stride, rows,
    scale, scale_log2,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    segment, head = tl.program_id(1), tl.program_id(2)
    start = tl.load(offsets_ptr + segment).to(tl.int64)
    length = (tl.load(offsets_ptr + segment + 1) - start).to(tl.int32)
    if (tl.program_id(0) * ROWS >= length) | (length >= known):
        return
    parts = tl.load(parts_ptr + length)
    if parts == 1:
        return
    row, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    fits = (row < length)[:, None] & (columns < WIDTH)[None, :]
    query = tl.load(
        q_ptr + start * q_stride + head * WIDTH + row[:, None] * q_stride + columns[None, :], mask=fits, other=0.0
    )
    k_ptr, v_ptr = k_ptr + start * k_stride + head * WIDTH, v_ptr + start * v_stride + head * WIDTH
    numbers = tl.arange(0, PARTS)
    found = tl.full([ROWS, PARTS], float("-inf"), tl.float32)
    for part in range(parts):
        largest, added, _ = _attend_to_part(
            query, k_ptr, v_ptr, part, parts, length, k_stride, v_stride, scale_log2,
            WIDTH, COLUMNS, ROWS, KEYS, False,
        )  # fmt: skip
        value = tl.fma(largest, tl.zeros_like(largest) + scale, fast_log(added))
        found = tl.where(numbers[None, :] == part, value[:, None], found)
    top = tl.max(found, 1)
    whole = log(_butterfly(exp(found - top[:, None]), ROWS, PARTS)) + top
    tl.store(logsumexp_ptr + head * rows + start + row, whole, mask=row < length)
    shares = exp(found - whole[:, None])
    out = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in range(parts):
        _, added, values = _attend_to_part(
            query, k_ptr, v_ptr, part, parts, length, k_stride, v_stride, scale_log2,
            WIDTH, COLUMNS, ROWS, KEYS, True,
        )  # fmt: skip
        share = tl.sum(tl.where(numbers[None, :] == part, shares, 0.0), 1)
        values *= tl.div_rn(tl.full([ROWS], 1.0, tl.float32), added)[:, None]
        out = tl.fma(tl.broadcast_to(share[:, None], out.shape), values, out)
    out_ptr += (start * tl.num_programs(2) + head) * WIDTH
    place = row[:, None] * (tl.num_programs(2) * WIDTH) + columns[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=fits)


def split_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    offsets: Tensor,
    largest: int,
    scale: float,
) -> None:
    """Compute again, in place, segments whose keys PyTorch splits where it attends in each alone.

    Args:
        query, key, value: `[tokens, heads, width]` bf16 or fp16; heads lie behind each other.
        out: `[tokens, heads, width]`, contiguous.
        logsumexp: `[heads, tokens]` fp32, contiguous.
        offsets: `[segments + 1]` int32 `cu_seqlens`.
        largest: Bound of a segment's length in tokens.
        scale: What the products of queries and keys are multiplied by.
    """
    tokens, heads, width = query.shape
    parts, most = _parts(heads, width, query.device)
    longest = min(largest, len(parts) - 1)
    if longest <= block_of(width):
        return
    scale = float(np.float32(scale))
    launch(
        _split_keys,
        (triton.cdiv(longest, ROWS), len(offsets) - 1, heads),
        *(query, key, value, out, logsumexp, offsets, parts, len(parts)),
        *(query.stride(0), key.stride(0), value.stride(0), tokens, scale, float(np.float32(scale * LOG2_E))),
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width),
        ROWS=ROWS,
        KEYS=block_of(width),
        PARTS=triton.next_power_of_2(most),
        num_warps=WARPS,
        num_stages=1,
        enable_fp_fusion=False,
    )


@cache
def agrees(heads: int, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this PyTorch splits keys as is known here, and results are the same bits; says so where they are not.

    The first call compiles the kernel and compares on the device, one segment for each number of parts.

    Raises:
        CaptureError: A capture is under way at the first call.
    """
    reason = tried("split attention", lambda: _difference(heads, width, dtype, device))
    if reason:
        announce(f"attention in short images rounds otherwise than eager's, for heads of {width}: {reason}")
    return not reason


def _difference(heads: int, width: int, dtype: torch.dtype, device: torch.device) -> str:
    parts = parts_by_length(heads, width, torch.cuda.get_device_properties(device).multi_processor_count)
    lengths = list({count: length for length, count in enumerate(parts) if count > 1}.values())
    if not lengths:
        return ""
    generator = torch.Generator(device=device).manual_seed(0)
    mixed = torch.randn((sum(lengths), 3, heads, width), device=device, generator=generator).to(dtype)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    largest, scale = max(lengths), width**-0.5
    query, key, value = mixed.unbind(1)
    out, logsumexp, *_ = flash_forward(query, key, value, offsets, largest, scale)
    split_keys(query, key, value, out, logsumexp, offsets, largest, scale)
    alone = (
        flash_forward(part[:, :, 0], part[:, :, 1], part[:, :, 2], None, part.shape[1], scale)
        for part in mixed[None].split(lengths, 1)
    )
    outs, logsumexps = zip(*((out[0], logsumexp[0]) for out, logsumexp, *_ in alone), strict=True)
    equal = torch.equal(out, torch.cat(outs)) and torch.equal(logsumexp, torch.cat(logsumexps, 1))
    return "" if equal else "this PyTorch computes other bits"
