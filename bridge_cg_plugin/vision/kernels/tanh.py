"""CUDA's tanh without its branch: both halves are computed, one is taken, so that a thread's values need not wait."""

import triton
import triton.language as tl


@triton.jit
def reciprocal(x):
    """Return 1 / x as the GPU's own instruction has it."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh(x):
    """Return tanh of fp32 values, equal to CUDA's `tanhf` to the last bit; to be compiled without fused multiply-adds.

    Two formulas, as there: 1 - 2 / (exp(2 |x|) + 1) from 0.6 on, an odd polynomial below.
    """
    size = tl.abs(x)
    large = tl.fma(reciprocal(tl.exp2(size * 2.885390043258667) + 1.0), -2.0, 1.0)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    large = (large.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    square = x * x
    small = tl.fma(square, 0.01573968306183815, -0.05230396240949631)
    small = tl.fma(small, square, 0.13315297663211823)
    small = tl.fma(small, square, -0.33332768082618713)
    small = tl.fma(small * square, x, x)
    return tl.where(size >= 0.6000000238418579, large, small)
