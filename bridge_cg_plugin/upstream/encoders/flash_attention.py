"""FlashAttention-4's kernels for Hopper over packed segments, set up for heads that it does not expect.

The package keeps queries' gradients in fp32 rows whose width its kernels disagree on where a head is no multiple of 32:
its main kernel rounds up to 16, those before and after it to 32. Here all of them round up to 16, with blocks of 128
rows, the only ones that the kernel before then covers without writing past them.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...announce import warn
from ...graphs.errors import named
from ...options.vision import FLASH_ATTENTION as PACKAGE
from ...vision.kernels.cudnn_attention import refuse_capture
from ...vision.kernels.packed_attention import masked_attention
from ...vision.kernels.padding import clear_padding
from ..wrappers import overridden

INTERFACE = "flash_attn.cute.interface"
HOPPER = (9, 0)
# Bounds of the largest segment, in tokens, from which it was faster on an H200: docs/benchmarks/vision_bench.jsonl.
FLASH_FROM = 640
# Heads of other widths than multiples of 32 for which the blocks below were tried.
ODD_WIDTHS = range(72, 81, 8)
ROUNDED_TO = 16
BLOCKS = {"m_block_size": 128, "n_block_size": 128, "AtomLayoutMdQ": 2, "dQ_single_wg": False}
# What of the package is called or replaced.
USED = ("_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert", "_tile_size_bwd_sm90")
# Relative L2 distance from fp32 that a right result in bf16 stays under.
AGREES = 2e-2


def unavailable() -> str | None:
    """Return why the package cannot be used here, or None where it can."""
    if torch.cuda.get_device_capability() != HOPPER:
        return f"{torch.cuda.get_device_name()} is no Hopper GPU"
    try:
        interface = importlib.import_module(INTERFACE)
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        return f"the package {PACKAGE} cannot be used ({type(error).__name__}: {error})"
    missing = [name for name in USED if not hasattr(interface, name)]
    return f"{PACKAGE} {_version()} has no {missing[0]}" if missing else None


def _version() -> str:
    return importlib.metadata.version(PACKAGE)


def takes(width: int, dtype: torch.dtype) -> bool:
    """Whether the package supports heads of a width and dtype; `agrees` checks its results."""
    return dtype in (torch.bfloat16, torch.float16) and (width in (32, 64, 96, 128) or width in ODD_WIDTHS)


def suits(query: Tensor, largest: int) -> bool:
    """Whether the package is the faster for queries `[tokens, heads, width]`, and right for such heads.

    Args:
        query: The queries.
        largest: Tokens of the largest segment at most.
    """
    width, dtype = query.shape[2], query.dtype
    return largest >= FLASH_FROM and takes(width, dtype) and agrees(width, dtype, query.device.index)


@contextmanager
def _suited(interface: ModuleType, width: int) -> Iterator[None]:
    """Let the package's backward handle heads of the width alike in all of its kernels."""
    if width not in ODD_WIDTHS:
        yield
        return
    with ExitStack() as stack:
        for name in ("_bwd_preprocess", "_bwd_postprocess_convert"):
            stack.enter_context(overridden(interface, name, _rounding(getattr(interface, name))))
        sizes = interface._tile_size_bwd_sm90
        stack.enter_context(overridden(interface, "_tile_size_bwd_sm90", _with_blocks(sizes)))
        yield


def _rounding(kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)  # and its attributes: it finds its compiled kernels at its own name
    def rounding(*args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs | {"hdim_multiple_of": ROUNDED_TO})

    return rounding


def _with_blocks(sizes: Callable[..., Any]) -> Callable[..., Any]:
    def with_blocks(*args: Any, **kwargs: Any) -> Any:
        return dataclasses.replace(sizes(*args, **kwargs), **BLOCKS)

    return with_blocks


def _inside_segments(offsets: Tensor, largest: int, scale: float) -> dict[str, Any]:
    return {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": largest,
        "max_seqlen_k": largest,
        "softmax_scale": scale,
    }


class _FlashAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, largest: int, scale: float
    ) -> Tensor:
        out: Tensor
        interface = importlib.import_module(INTERFACE)
        out, lse, *_ = interface._flash_attn_fwd(
            query, key, value, return_lse=True, **_inside_segments(offsets, largest, scale)
        )
        clear_padding(out, offsets)
        ctx.save_for_backward(query, key, value, out, lse, offsets)
        ctx.largest, ctx.scale = largest, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        interface = importlib.import_module(INTERFACE)
        query, key, value, out, lse, offsets = ctx.saved_tensors
        tokens, heads, width = query.shape
        whole = torch.empty((tokens, heads, 3, width), dtype=query.dtype, device=query.device)
        gradients = whole.unbind(2)
        with _suited(interface, width):
            interface._flash_attn_bwd(
                query,
                key,
                value,
                out,
                gradient.contiguous(),
                lse,
                dq=gradients[0],
                dk=gradients[1],
                dv=gradients[2],
                **_inside_segments(offsets, ctx.largest, ctx.scale),
            )
        clear_padding(whole, offsets)
        return *gradients, None, None, None


def flash_attention(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, largest: int, scale: float) -> Tensor:
    """Attend inside every segment.

    Args:
        query, key, value: `[tokens, heads, width]` bf16 or fp16 on a Hopper GPU; see `suits`.
        offsets: `[segments + 1]` int32 `cu_seqlens` on the device; rows behind the last one are padding.
        largest: Tokens of the largest segment at most.
        scale: What the products of queries and keys are multiplied by.

    Returns:
        `[tokens, heads, width]`, contiguous; zero in padding, as are the gradients, which lie interleaved.
    """
    out: Tensor = _FlashAttention.apply(query, key, value, offsets, largest, scale)
    return out


@cache
def agrees(width: int, dtype: torch.dtype, device: int) -> bool:
    """Whether the package computes attention and its gradients for heads of a width; says so where it does not.

    The first call compiles its kernels and compares them with fp32 on a device.

    Raises:
        CaptureError: A capture is under way at the first call.
    """
    refuse_capture(f"{PACKAGE} would be tried")
    try:
        with torch.cuda.device(device):
            far = _distance_from_fp32(width, dtype, torch.device("cuda", device))
        reason = "" if far <= AGREES else f"a result differs by {far:.1e}"
    except Exception as error:  # of a compiler: anything
        reason = named(error)
    if reason:
        warn(f"{PACKAGE} {_version()} fails for heads of {width}, which other kernels compute: {reason}")
    return not reason


def _distance_from_fp32(width: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest relative L2 distance of the output and three gradients from plain attention in fp32."""
    lengths, padding, heads = (200, 96, 328), 16, 2
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (sum(lengths) + padding, heads, 4, width)
    *parts, gradient = torch.randn(shape, device=device, generator=generator).to(dtype).unbind(2)
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

    def results(attend: Callable[..., Tensor], kind: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [part.detach().to(kind).requires_grad_() for part in parts]
        out = attend(*leaves)
        return out, *torch.autograd.grad(out, leaves, gradient.to(kind))

    with torch.enable_grad():
        found = results(lambda q, k, v: flash_attention(q, k, v, offsets, max(lengths), width**-0.5), dtype)
        expected = results(lambda q, k, v: masked_attention(q, k, v, offsets, width**-0.5), torch.float32)
    far = [(a.float() - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)]
    return float(torch.stack(far).max())  # NaN if one is
