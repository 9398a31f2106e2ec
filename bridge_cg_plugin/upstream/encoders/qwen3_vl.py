"""Bridge's Qwen3-VL vision model: how to find it, what its graphs need from upstream, and its one patch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...options import PROVIDER_FIELDS, vision_options
from ...vision.adapter import EncoderFamily, OtherAttention
from ...vision.encoders.qwen3_vl import Qwen3VLAdapter, movable_images
from ..kernels.layers import fused_layer_kernels, fused_layernorm_backward, kernels_available
from ..kernels.rotary import fused_rotary
from ..kernels.saved_tensors import known_activations
from ..kernels.side_products import side_weight_gradients, side_workspace
from ..kernels.transformer_engine import accumulate_from_now_on, forget_attention_selection, fused_accumulation
from ..seams.patches import Patch
from ..seams.registry import seam
from ..wrappers import unwrapped
from .direct_attention import direct_attention, direct_attention_refusal, flash_attention, flash_attention_refusal
from .patch_gradients import patch_gradients
from .side_branches import side_mergers

PADDING_SWITCH = seam("vision_padding_switch").target.rpartition(".")[2]


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
    with side_workspace(), side_mergers(modules), ExitStack() as stack:
        for kernels in (fused_rotary, fused_layer_kernels) if kernels_available() else ():
            stack.enter_context(kernels(modules))
        yield


@contextmanager
def reordering_kernels(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let upstream's modules call kernels that round a gradient otherwise than eager does."""
    with patch_gradients(modules), fused_layernorm_backward(modules) if kernels_available() else nullcontext():
        yield


@contextmanager
def accumulating_products(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let weight gradients be added to `main_grad` inside their product, on the side stream if there is one."""
    with fused_accumulation(modules), side_weight_gradients(modules):
        yield


QWEN3_VL = EncoderFamily(
    name="Qwen3-VL",
    adapt=partial(Qwen3VLAdapter, pack_segments=pack_segments),
    kernels=fused_kernels,
    reordering_kernels=reordering_kernels,
    direct_attention=OtherAttention(direct_attention, direct_attention_refusal),
    flash_attention=OtherAttention(flash_attention, flash_attention_refusal),
    fused_accumulation=accumulating_products,
    before_eager=accumulate_from_now_on,
    pack_segments=pack_segments,
    movable=movable_images,
    driven_by_bridge=True,
    known_activations=known_activations,
)


def holders(chunks: nn.Module | Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield what may be a model with parts of its own: every module under wrappers, and its `model`."""
    for chunk in [chunks] if isinstance(chunks, nn.Module) else chunks:
        for module in unwrapped(chunk):
            yield module
            inner = getattr(module, "model", None)
            if isinstance(inner, nn.Module):
                yield inner


def find_vision_model(chunks: nn.Module | Sequence[nn.Module]) -> tuple[nn.Module, nn.Module] | None:
    """Return (vision model, the module that holds it or the model itself), or None on a stage without one.

    A vision model is found as `vision_model` under any wrapper, one level deeper under `model`, or handed over itself.
    """
    for holder in holders(chunks):
        vision = getattr(holder, "vision_model", None)
        if isinstance(vision, nn.Module):
            return vision, holder
        if hasattr(holder, "patch_embed") and hasattr(holder, "decoder"):
            return holder, holder
    return None


def _never_pads(old: Callable[..., Any]) -> Callable[..., Any]:
    """Upstream's own padding and masking for graphs drops the attention boundaries: forward never takes that path."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self)[PADDING_SWITCH] = _no
        try:
            return old(self, *args, **kwargs)
        finally:
            del vars(self)[PADDING_SWITCH]

    return forward


def _no() -> bool:
    return False


def _may_pad(old: Callable[..., Any]) -> bool:
    """Whether a forward may pad; one that is not upstream's own may call it."""
    calls_switch = PADDING_SWITCH in getattr(getattr(old, "__code__", None), "co_names", ())
    return calls_switch or getattr(old, "__module__", "") != seam("vision_padding").module


def _says_graphs(old: Callable[..., Any]) -> Callable[..., Any]:
    def get_vision_model_config(hf_config: Any, megatron_config: Any = None) -> Any:
        config = old(hf_config, megatron_config)
        if getattr(megatron_config, PROVIDER_FIELDS["impl"], "none") != "none":
            options = vision_options(megatron_config, config.spatial_merge_size**2)
            config.cuda_graph_impl = options.impl
            config.cuda_graph_scope = _scopes(options.modules)
            config.max_vision_cuda_graph_seq_length = options.max_seq_length
        return config

    return get_vision_model_config


def _scopes(modules: Sequence[str]) -> list[Any]:
    from megatron.core.transformer.enums import CudaGraphScope

    return [CudaGraphScope[name] for name in modules]


def _carries_nothing(old: Callable[..., Any]) -> bool:
    return PROVIDER_FIELDS["impl"] not in getattr(getattr(old, "__code__", None), "co_consts", ())


PATCHES = (
    Patch(seam("vision_padding"), _never_pads, needed=_may_pad),
    Patch(seam("vision_config"), _says_graphs, needed=_carries_nothing),
)
