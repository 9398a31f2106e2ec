"""CUDA's tanh without its branch: all parts are computed, one is taken, so that a thread's values need not wait."""

import triton
import triton.language as tl


@triton.jit
def reciprocal(x):
    """Return 1 / x as the GPU's own instruction has it."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh(x):
    """Return tanh of fp32 values as CUDA's `tanhf` rounds it; to be compiled without fused multiply-adds.

    The same instructions: 1 - 2 / (exp(2 |x|) + 1) from 0.6 on, 1 where that rounds to it, an odd polynomial below.
    Only the sign of a zero differs.
    """
    size = tl.abs(x)
    large = tl.fma(reciprocal(tl.exp2(size * 2.885390043258667) + 1.0), -2.0, 1.0)
    large = tl.where(size >= 9.010913848876953, 1.0, large)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    large = (large.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    square = x * x
    small = tl.fma(square, 0.01573968306183815, -0.05230396240949631)
    small = tl.fma(small, square, 0.13315297663211823)
    small = tl.fma(small, square, -0.33332768082618713)
    small = tl.fma(small * square, x, x)
    return tl.where(size >= 0.6000000238418579, large, small)
