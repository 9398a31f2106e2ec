"""Other attention in Transformer Engine's place while recording: cuDNN's called directly, or FlashAttention."""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...attention_bounds import deterministic
from ...graphs.instance import modules_where
from ...upstream_types import UpstreamModule
from ..kernels.layers import is_te_attention, kernels_available
from ..kernels.transformer_engine import HOPPER, fused_attention_refusal
from ..seams.states import fits
from ..wrappers import overridden

CUDNN, FLASH = "...vision.kernels.cudnn_attention", ".flash_attention"


def direct_attention_refusal() -> str | None:
    """Return why cuDNN is not called directly in this process, or None where it is.

    It is called only where eager attends by the same kernels, so that outputs stay eager's.
    """
    return _process_refusal() or _settings_refusal() or fused_attention_refusal() or _unavailable(CUDNN)


def segment_attention_refusal() -> str | None:
    """Return why cuDNN does not attend in the place of PyTorch's packed kernels, or None where it does.

    Its outputs differ from eager's, as those of packed kernels do, so the kernels by which eager attends do not matter.
    """
    return _process_refusal() or _age_refusal() or _unavailable(CUDNN)


def flash_attention_refusal() -> str | None:
    """Return why FlashAttention is not called in this process, or None where it is.

    Its outputs differ from eager's in any case, so the kernels by which eager attends do not matter.
    """
    return _process_refusal() or _settings_refusal() or _unavailable(FLASH)


def _process_refusal() -> str | None:
    if deterministic():
        return "deterministic algorithms are asked for"
    return None if kernels_available() else "there is no GPU with Triton"


def _settings_refusal() -> str | None:
    if fits("attention_settings", "attention_scale"):
        return None
    return "this release sets attention up otherwise than those that were looked at"


def _age_refusal() -> str | None:
    if torch.cuda.get_device_capability() >= HOPPER:
        return None
    return f"{torch.cuda.get_device_name()} is older than Hopper GPUs, where cuDNN's kernels are faster"


def _unavailable(module: str) -> str | None:
    refusal: str | None = importlib.import_module(module, __package__).unavailable()  # which imports compilers
    return refusal


def direct_attention(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Let Transformer Engine's attention modules below `modules` call cuDNN with a bucket's own bounds.

    What a direct call does not do stays as it is: see `_attends_inside_segments`.
    """
    return _attending(modules, partial(_attend_directly, located()))


def flash_attention(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Let Transformer Engine's attention modules below `modules` call FlashAttention where segments may be long.

    Shorter ones, and what FlashAttention does not do, stay as they are: see `_attends_inside_segments`.
    """
    return _attending(modules, _attend_by_flash)


# Called with the module, queries, keys, values and metadata of their segments; None where it does not attend so.
_Attend = Callable[[UpstreamModule, Tensor, Tensor, Tensor, Any], Tensor | None]


@contextmanager
def _attending(modules: Sequence[nn.Module], attend: _Attend) -> Iterator[None]:
    """Let attention modules attend otherwise where they attend inside segments, and `attend` does."""
    with ExitStack() as stack:
        for module in modules_where(is_te_attention, modules):
            stack.enter_context(overridden(module, "forward", partial(_forward, attend, module, module.forward)))
        yield


def _forward(
    attend: _Attend,
    attention: UpstreamModule,
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    found = None
    if _attends_inside_segments(attention, query, args, kwargs):
        found = attend(attention, query, key, value, kwargs["packed_seq_params"])
    return original(query, key, value, *args, **kwargs) if found is None else found.view(query.shape[0], -1)


# Returns where segments lie by their offsets, heads and the width of one; see `locate_segments`.
Locate = Callable[[Tensor, int, int], Any]


def located() -> Locate:
    """Return a function that computes where the segments of a microbatch lie, once for all layers."""
    from ...vision.kernels.cudnn_attention import locate_segments

    return functools.cache(locate_segments)  # by the tensor itself, which it keeps alive


def _attend_directly(
    locate: Locate, attention: UpstreamModule, query: Tensor, key: Tensor, value: Tensor, packed: Any
) -> Tensor | None:
    """Attend by cuDNN inside segments, over what one projection made."""
    from ...vision.kernels.cudnn_attention import lie_interleaved, plans_for, segment_attention

    if not lie_interleaved(query, key, value):
        return None
    (_, heads, width), segments = query.shape, packed.cu_seqlens_q.shape[0] - 1
    plans = plans_for(query, segments, packed.max_seqlen_q, attention.fused_attention.softmax_scale)
    if plans is None:
        return None
    return segment_attention(query, key, value, locate(packed.cu_seqlens_q, heads, width), plans)


def _attend_by_flash(
    attention: UpstreamModule, query: Tensor, key: Tensor, value: Tensor, packed: Any
) -> Tensor | None:
    from . import flash_attention as flash

    offsets, largest = packed.cu_seqlens_q, packed.max_seqlen_q
    if not flash.suits(query, largest):
        return None
    return flash.flash_attention(query, key, value, offsets, largest, attention.fused_attention.softmax_scale)


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
