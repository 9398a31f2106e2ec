"""Vision towers that Bridge takes from Hugging Face: what their graphs need besides the modules themselves."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...graphs.modules import every_module
from ...options import OptionError
from ...upstream_types import UpstreamModule
from ...vision.adapter import EncoderFamily
from ...vision.encoders.qwen25_vl import Qwen25VLAdapter
from ...vision.encoders.siglip import SiglipAdapter
from ...vision.kernels.aligned_linear import aligned_linear, is_misaligned
from ...vision.kernels.packed_attention import DTYPES, PackedSegments, packed_attention
from ..attributes import replaced
from ..kernels.saved_tensors import known_activations
from .patch_gradients import patch_gradients

WINDOW_ATTENTION = "Qwen2_5_VLVisionAttention"


@contextmanager
def packed_window_attention(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let Qwen2.5-VL's attention take `PackedSegments` while a region of these modules is recorded.

    Hugging Face's own reads the offsets on the host and attends segment by segment, or hands the longest segment's
    length over as a device tensor.
    """
    with ExitStack() as stack:
        for module in every_module(modules):
            if type(module).__name__ == WINDOW_ATTENTION:
                stack.enter_context(replaced(module, "forward", partial(_packed_forward, module)))
        yield


def _packed_forward(
    attention: UpstreamModule,
    hidden_states: Tensor,
    cu_seqlens: PackedSegments,
    position_embeddings: tuple[Tensor, Tensor],
) -> Tensor:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

    tokens = hidden_states.shape[0]
    mixed = attention.qkv(hidden_states).view(tokens, 3, attention.num_heads, -1)
    query, key, value = mixed.unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, *position_embeddings)
    context = packed_attention(query, key, value, cu_seqlens, attention.scaling)
    projected: Tensor = attention.proj(context.reshape(tokens, -1))
    return projected


@contextmanager
def aligned_backward(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let linear layers of odd widths multiply matrices of aligned ones in their backward, while work is recorded."""
    with ExitStack() as stack:
        for module in every_module(modules):
            if type(module) is nn.Linear and is_misaligned(module):
                stack.enter_context(replaced(module, "forward", partial(_aligned_forward, module)))
        yield


@contextmanager
def reordering_kernels(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let Qwen2.5-VL's modules call kernels that round a gradient otherwise than eager does."""
    with aligned_backward(modules), patch_gradients(modules):
        yield


def _aligned_forward(linear: nn.Linear, x: Tensor) -> Tensor:
    return aligned_linear(x, linear.weight, linear.bias)


def adapt_qwen25_vl(model: UpstreamModule) -> Qwen25VLAdapter:
    """Return Qwen2.5-VL's adapter.

    Raises:
        OptionError: The model checkpoints its layers, or computes in a type that packed attention does not take.
    """
    refuse_checkpointing(model)
    weight = model.patch_embed.proj.weight
    if weight.device.type == "cuda" and weight.dtype not in DTYPES:
        raise OptionError(
            "model.params_dtype",
            weight.dtype,
            "torch.bfloat16 or torch.float16 with vision graphs of Qwen2.5-VL",
            "Its windows attend in PyTorch's packed flash kernels. Train in bf16, or switch vision graphs off.",
        )
    return Qwen25VLAdapter(model, lambda merged: _result(pooler_output=merged))


def adapt_siglip(model: nn.Module) -> SiglipAdapter:
    """Return SigLIP's adapter.

    Raises:
        OptionError: The model checkpoints its layers.
    """
    refuse_checkpointing(model)
    return SiglipAdapter(model, lambda hidden, pooled=None: _result(last_hidden_state=hidden, pooler_output=pooled))


def _result(**tensors: Any) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(**tensors)


def refuse_checkpointing(model: nn.Module) -> None:
    """Refuse a tower whose layers are computed anew in the backward.

    Raises:
        OptionError: It is one.
    """
    if getattr(model, "is_gradient_checkpointing", False):
        raise OptionError(
            "gradient_checkpointing",
            True,
            "false on a vision tower with vision_cuda_graph_impl=transformer_engine",
            "Call gradient_checkpointing_disable() on it: its activations live in the graph's memory.",
        )


QWEN25_VL = EncoderFamily(
    name="Qwen2.5-VL",
    adapt=adapt_qwen25_vl,
    kernels=packed_window_attention,
    reordering_kernels=reordering_kernels,
    known_activations=known_activations,
)
SIGLIP = EncoderFamily(name="SigLIP", adapt=adapt_siglip, known_activations=known_activations)
