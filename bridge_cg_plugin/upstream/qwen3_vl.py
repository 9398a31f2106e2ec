"""Bridge's Qwen3-VL vision model: how to find it, what its graphs need from upstream, and its one patch."""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..vision.encoder import EncoderFamily
from .layer_kernels import fused_layer_kernels, fused_layernorm_backward, replaced
from .patches import Patch
from .transformer_engine import forget_attention_selection, fused_accumulation

MODEL = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model"
ATTENTION = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention"
ROTARY = "apply_rotary_pos_emb_absolute"
WRAPPER_DEPTH = 8


def pack_segments(offsets: Tensor, largest: int) -> Any:
    """Return megatron-core's metadata for packed segments.

    Args:
        offsets: `[segments + 1]` int32 `cu_seqlens`.
        largest: Bound of a segment's length in tokens; a plain integer, so nothing reads the device.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=largest,
        max_seqlen_kv=largest,
    )


@contextmanager
def fused_kernels(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let upstream's modules call the plugin's kernels while a region of these modules is recorded.

    Without Triton or a GPU upstream's own functions stay.
    """
    forget_attention_selection()
    if not kernels_available():
        yield
        return
    with fused_rotary(), fused_layer_kernels(modules):
        yield


def kernels_available() -> bool:
    """Whether the plugin's Triton kernels can run here."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


@contextmanager
def reordering_kernels(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let upstream's modules call kernels that round a gradient otherwise than eager does."""
    with fused_layernorm_backward() if kernels_available() else nullcontext():
        yield


@contextmanager
def fused_rotary() -> Iterator[None]:
    """Let upstream's attention module rotate queries and keys with the plugin's kernel."""
    attention = sys.modules.get(ATTENTION)
    if attention is None:
        yield
        return
    with replaced(attention, ROTARY, _fused_rotary(getattr(attention, ROTARY))):
        yield


def _fused_rotary(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    from ..vision.kernels.rotary import apply_rotary, cos_and_sin

    tables: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def apply_rotary_pos_emb_absolute(
        t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        fits = (
            cu_seqlens is not None
            and t.dim() == 3
            and freqs.shape[-1] == t.shape[-1]
            and config.apply_rotary_pos_emb_in_fp32
            and not config.rotary_interleaved
        )
        if not fits:
            return original(t, freqs, config, cu_seqlens)
        if id(freqs) not in tables:
            tables[id(freqs)] = (freqs, *cos_and_sin(freqs))
        return apply_rotary(t, *tables[id(freqs)][1:])

    return apply_rotary_pos_emb_absolute


QWEN3_VL = EncoderFamily(pack_segments, fused_kernels, reordering_kernels, fused_accumulation)


def _unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    for _ in range(WRAPPER_DEPTH):
        yield model
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return
        model = inner


def find_vision_model(chunks: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, nn.Module] | None:
    """Return (vision model, the module that holds it or the model itself), or None on a stage without one.

    A vision model is found as `vision_model` under any wrapper, one level deeper under `model`, or handed over itself.
    """
    for chunk in [chunks] if isinstance(chunks, nn.Module) else chunks:
        for module in _unwrapped(chunk):
            for holder in (module, getattr(module, "model", None)):
                vision = getattr(holder, "vision_model", None)
                if isinstance(vision, nn.Module):
                    return vision, holder
            if hasattr(module, "patch_embed") and hasattr(module, "decoder"):
                return module, module
    return None


def _never_pads(_old: Callable[..., bool]) -> Callable[..., bool]:
    def _uses_vision_cuda_graph(self) -> bool:
        """Upstream's own padding and masking for graphs is never used: it drops the attention boundaries."""
        return False

    return _uses_vision_cuda_graph


PATCHES = (
    Patch(
        name="vision_padding",
        module=MODEL,
        target="Qwen3VLVisionModel._uses_vision_cuda_graph",
        make=_never_pads,
        purpose="warm-up and eager steps keep attention inside each image",
        parameters=("self",),
        optional=True,
    ),
)
