"""Other attention in Transformer Engine's place while recording: cuDNN's called directly, or FlashAttention."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...attention_bounds import UNPACKED_FROM, deterministic
from ...graphs.instance import every_module
from ...upstream_types import UpstreamModule
from ..kernels.layers import is_te_attention, kernels_available
from ..kernels.transformer_engine import HOPPER, fused_attention_refusal
from ..wrappers import overridden

# Bounds of the largest segment, in tokens, from which FlashAttention was faster on an H200:
# docs/benchmarks/vision_bench.jsonl.
FLASH_FROM = 640


def direct_attention_refusal() -> str | None:
    """Return why cuDNN is not called directly in this process, or None where it is.

    It is called only where eager attends by the same kernels, so that outputs stay eager's.
    """
    refusal = _process_refusal() or fused_attention_refusal()
    if refusal is not None:
        return refusal
    from ...vision.kernels.cudnn_graphs import unavailable

    return unavailable()


def segment_attention_refusal() -> str | None:
    """Return why cuDNN does not attend in the place of PyTorch's packed kernels, or None where it does.

    Its outputs differ from eager's, as those of packed kernels do, so the kernels by which eager attends do not matter.
    """
    refusal = _process_refusal()
    if refusal is not None:
        return refusal
    if torch.cuda.get_device_capability() < HOPPER:
        return f"{torch.cuda.get_device_name()} is older than Hopper GPUs, where cuDNN's kernels are faster"
    from ...vision.kernels.cudnn_graphs import unavailable

    return unavailable()


def flash_attention_refusal() -> str | None:
    """Return why FlashAttention is not called in this process, or None where it is.

    Its outputs differ from eager's in any case, so the kernels by which eager attends do not matter.
    """
    refusal = _process_refusal()
    if refusal is not None:
        return refusal
    from .flash_attention import unavailable

    return unavailable()


def _process_refusal() -> str | None:
    if deterministic():
        return "deterministic algorithms are asked for"
    return None if kernels_available() else "there is no GPU with Triton"


@contextmanager
def direct_attention(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let Transformer Engine's attention modules below `modules` call cuDNN with a bucket's own bounds.

    What a direct call does not do stays as it is: see `_attends_directly`.
    """
    with _attending(modules, functools.partial(_attention_forward, Located())):
        yield


@contextmanager
def flash_attention(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let Transformer Engine's attention modules below `modules` call FlashAttention where segments may be long.

    Shorter ones, and what FlashAttention does not do, stay as they are: see `_attends_inside_segments`.
    """
    with _attending(modules, _flash_forward):
        yield


@contextmanager
def _attending(modules: Sequence[nn.Module], forward: Callable[..., Tensor]) -> Iterator[None]:
    """Replace the `forward` of attention modules by `forward(module, its forward until now, ...)`."""
    with ExitStack() as stack:
        for module in every_module(modules):
            if is_te_attention(module):
                stack.enter_context(overridden(module, "forward", functools.partial(forward, module, module.forward)))
        yield


class Located:
    """Where the segments of a microbatch lie, computed once for all layers."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int, int], Any] = {}

    def __call__(self, offsets: Tensor, heads: int, width: int) -> Any:
        """See `locate_segments`."""
        from ...vision.kernels.segment_attention import locate_segments

        key = (id(offsets), heads, width)
        if key not in self._found:
            self._found[key] = locate_segments(offsets, heads, width)  # which keeps `offsets`, and so its id, alive
        return self._found[key]


def _attention_forward(
    located: Located,
    attention: UpstreamModule,
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    from ...vision.kernels.segment_attention import plans_for, segment_attention

    packed: Any = kwargs.get("packed_seq_params")
    plans = None
    if packed is not None and _attends_directly(attention, query, key, value, args, kwargs):
        segments = packed.cu_seqlens_q.shape[0] - 1
        plans = plans_for(query, segments, packed.max_seqlen_q, attention.softmax_scale)
    if plans is None:
        return original(query, key, value, *args, **kwargs)
    tokens, heads, width = query.shape
    return segment_attention(query, key, value, located(packed.cu_seqlens_q, heads, width), plans).view(tokens, -1)


def _flash_forward(
    attention: UpstreamModule,
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    packed: Any = kwargs.get("packed_seq_params")
    if not _attends_inside_segments(attention, query, args, kwargs) or packed.max_seqlen_q < FLASH_FROM:
        return original(query, key, value, *args, **kwargs)
    from . import flash_attention as flash

    tokens, _, width = query.shape
    if not flash.takes(width, query.dtype) or not flash.agrees(width, query.dtype, query.device.index):
        return original(query, key, value, *args, **kwargs)
    offsets, largest, scale = packed.cu_seqlens_q, packed.max_seqlen_q, attention.softmax_scale
    return flash.flash_attention(query, key, value, offsets, largest, scale).view(tokens, -1)


def _attends_directly(
    attention: nn.Module, query: Tensor, key: Tensor, value: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether cuDNN can be called directly: for several packed segments, over what one projection made."""
    from ...vision.kernels.segment_attention import lie_interleaved

    if not _attends_inside_segments(attention, query, args, kwargs):
        return False
    # One segment attends unpacked: no row is scanned in vain there.
    unpacked = kwargs["packed_seq_params"].cu_seqlens_q.shape[0] == 2 and query.shape[0] >= UNPACKED_FROM
    return not unpacked and lie_interleaved(query, key, value)


def _attends_inside_segments(
    attention: nn.Module, query: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether this is softmax attention inside packed segments and nothing else."""
    packed, mask = kwargs.get("packed_seq_params"), kwargs.get("attn_mask_type")
    others = {name for name, given in kwargs.items() if given is not None} - {"packed_seq_params", "attn_mask_type"}
    if packed is None or others or any(arg is not None for arg in args):
        return False
    if getattr(mask, "name", None) not in ("no_mask", "padding"):
        return False
    if packed.cu_seqlens_q is not packed.cu_seqlens_kv or packed.cu_seqlens_q_padded is not None:
        return False
    if not isinstance(packed.max_seqlen_q, int) or packed.max_seqlen_q != packed.max_seqlen_kv:
        return False
    if query.dim() != 3 or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    return _is_plain(attention)


def _is_plain(attention: UpstreamModule) -> bool:
    """Whether Transformer Engine's module is set up for softmax attention without dropout, windows or fp8."""
    config = attention.config
    dropped = attention.training and attention.attention_dropout > 0
    unusual = dropped or attention.softmax_type != "vanilla" or attention.return_max_logit or config.fp8
    whole = tuple(attention.window_size) == (-1, -1) and config.context_parallel_size == 1
    return whole and not unusual
