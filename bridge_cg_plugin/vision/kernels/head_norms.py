"""Backward of RMSNorm over heads of 128, equal to Transformer Engine's bit for bit, without its slow last kernel.

Transformer Engine sums the weight's gradient in thousands of partial sums and adds these up in a kernel of four blocks
that waits for memory at every addition: 75 us on an H200, for queries and for keys of every layer. These kernels add
the same numbers in the same order (`rmsnorm_bwd_general_kernel` of Transformer Engine 2.14 to 2.20).
"""

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...announce import LOGGER

WIDTH = 128
WARPS = 4  # rows that a block of Transformer Engine's takes at once
# Blocks of a multiprocessor: as many as registers allow, which depends on the compiler that built Transformer Engine.
BLOCKS = range(1, 17)
COLUMNS, AT_ONCE = 32, 32

# Transformer Engine's: gradient, x, rstd, weight, multiprocessors left to others, zero-centered weight.
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, int, bool], Sequence[Tensor]]

_found: dict[int, int | None] = {}  # by the GPU's index


@triton.jit
def _pairs(values, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Add neighbours, as lanes of a warp do that exchange what they have."""
    return tl.sum(tl.reshape(values, (ROWS, HALF, 2)), axis=2)


@triton.jit
def _lanes(values, ROWS: tl.constexpr):
    """Return the four elements that each lane of a warp has of a row."""
    even, odd = tl.split(tl.reshape(values, (ROWS, 32, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit(do_not_specialize=["rows", "blocks"])
def _rows_backward(
    gradient_ptr, x_ptr, rstd_ptr, weight_ptr, out_ptr, partial_ptr, rows, blocks, ZERO_CENTERED: tl.constexpr
):
    column = tl.arange(0, 128)
    warp = tl.arange(0, 4)
    kind = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    sums = tl.zeros((4, 128), dtype=tl.float32)
    for start in tl.range(tl.program_id(0) * 4, rows, blocks * 4):
        row = start + warp
        there = (row < rows)[:, None]
        place = row.to(tl.int64)[:, None] * 128 + column[None, :]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        x = tl.load(x_ptr + place, mask=there, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_ptr + place, mask=there, other=0.0).to(tl.float32)
        y = rstd * x
        weighted = weight[None, :] * gradient
        sums = tl.fma(gradient, y, sums)
        w0, w1, w2, w3 = _lanes(weighted, 4)
        y0, y1, y2, y3 = _lanes(y, 4)
        along = tl.fma(w3, y3, tl.fma(w2, y2, tl.fma(w1, y1, w0 * y0)))
        along = _pairs(along, 4, 16)
        along = _pairs(along, 4, 8)
        along = _pairs(along, 4, 4)
        along = _pairs(along, 4, 2)
        along = tl.sum(along, axis=1)[:, None] * 0.0078125  # the mean of 128
        result = rstd * tl.fma(-along, y, weighted)
        tl.store(out_ptr + place, result.to(kind), mask=there)
    first, second = tl.split(tl.permute(tl.reshape(sums, (2, 2, 128)), (2, 0, 1)))
    s0, s2 = tl.split(first)
    s1, s3 = tl.split(second)
    tl.store(partial_ptr + tl.program_id(0) * 128 + column, s0 + s1 + s2 + s3)


@triton.jit(do_not_specialize=["blocks"])
def _sum_of_blocks(partial_ptr, out_ptr, blocks, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    warp = tl.arange(0, 4)
    sums = tl.zeros((4, COLUMNS), dtype=tl.float32)
    for start in tl.range(0, blocks, 4 * AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            block = start + 4 * step + warp
            there = (block < blocks)[:, None]
            sums += tl.load(partial_ptr + block[:, None] * 128 + column[None, :], mask=there, other=0.0)
    first, second = tl.split(tl.permute(tl.reshape(sums, (2, 2, COLUMNS)), (2, 0, 1)))
    s0, s2 = tl.split(first)
    s1, s3 = tl.split(second)
    tl.store(out_ptr + column, ((s0 + s2) + (s1 + s3)).to(out_ptr.dtype.element_ty))


def backward(
    gradient: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, zero_centered: bool, most: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of RMSNorm's input and weight.

    Args:
        gradient, x: `[rows, 128]`, of the output, and the input; contiguous.
        rstd: `[rows]`, fp32: one over the root of a row's mean square.
        weight: `[128]`.
        zero_centered: Whether one is added to the weight.
        most: Blocks that share the rows, at most.
    """
    rows = x.shape[0]
    blocks = min(triton.cdiv(rows, WARPS), most)
    out, of_weight = torch.empty_like(x), torch.empty_like(weight)
    partials = torch.empty((blocks, WIDTH), dtype=torch.float32, device=x.device)
    arguments = (gradient, x, rstd, weight, out, partials, rows, blocks)
    _rows_backward[(blocks,)](*arguments, ZERO_CENTERED=zero_centered, num_warps=WARPS)
    constants = {"COLUMNS": COLUMNS, "AT_ONCE": AT_ONCE, "num_warps": WARPS}
    _sum_of_blocks[(WIDTH // COLUMNS,)](partials, of_weight, blocks, **constants)
    return out, of_weight


def takes(gradient: Tensor, x: Tensor, weight: Tensor, margin: int) -> bool:
    """Return whether `backward` computes what Transformer Engine's call would."""
    kinds = {gradient.dtype, x.dtype, weight.dtype}
    dense = gradient.is_contiguous() and x.is_contiguous() and weight.shape == (WIDTH,)
    rows = x.dim() == 2 and x.shape[1] == WIDTH and len(x) > 0
    return x.is_cuda and kinds == {torch.bfloat16} and rows and dense and margin == 0


def most_blocks(device: int, original: Backward) -> int | None:
    """Return how many blocks Transformer Engine has on a GPU; None where no number gives the same bits.

    Also None where that is not known yet while a capture is under way, which would not survive the comparison.

    Args:
        device: Index of the GPU.
        original: Transformer Engine's `rmsnorm_bwd`.
    """
    if device not in _found:
        if torch.cuda.is_current_stream_capturing():
            return None
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        try:
            _found[device] = matching_blocks(torch.device("cuda", device), processors, original)
        except Exception:  # of a compiler: anything
            LOGGER.debug("norms over heads stay Transformer Engine's", exc_info=True)
            _found[device] = None
    return _found[device]


def matching_blocks(device: torch.device, processors: int, original: Backward) -> int | None:
    """Return for which number of blocks `backward` gives the original's bits, None for none of them.

    Rows come twice with opposite signs: sums are what rounding leaves of zero, and tell the order of additions.
    """
    half = processors * max(BLOCKS) * WARPS * 2 + 5
    places = torch.arange(half * WIDTH, dtype=torch.float64, device=device).view(half, WIDTH)
    x = torch.sin(places * 0.7).repeat(2, 1).bfloat16()
    gradient = torch.cos(places * 1.3)
    gradient = torch.cat((gradient, -gradient)).bfloat16()
    rstd = x.float().square().mean(1).add(1e-6).rsqrt()
    weight = torch.linspace(0.5, 1.5, WIDTH, device=device).bfloat16()
    expected = original(gradient, x, rstd, weight, 0, False)
    for blocks in BLOCKS:
        found = backward(gradient, x, rstd, weight, False, processors * blocks)
        if all(map(torch.equal, found, expected)):
            return processors * blocks
    return None
