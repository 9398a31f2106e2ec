"""Bridge's Qwen3-VL vision model: how to find it, what its graphs need from upstream, and its one patch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from ..vision.encoder import EncoderFamily
from .patches import Patch

MODEL = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model"
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


QWEN3_VL = EncoderFamily(pack_segments=pack_segments)


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
