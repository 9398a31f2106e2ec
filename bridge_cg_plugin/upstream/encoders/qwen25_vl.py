"""Qwen2.5-VL's vision encoder, Hugging Face's module, as a region: most layers attend inside windows."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...attention_bounds import scanned_limits
from ...graphs.buckets import Bucket
from ...graphs.modules import every_module
from ...graphs.program import Buffers, RegionProgram
from ...graphs.workload import Call
from ...options import OptionError
from ...upstream_types import UpstreamModule
from ...vision.adapter import EncoderFamily, RecordingKernels, encoder_call
from ...vision.batch import BatchError, VisionBatch, patch_shape, patches_misfit, read_patches
from ...vision.encoders.grid_program import GridProgram
from ...vision.encoders.layout import segment_offsets
from ...vision.encoders.windows import most_windows, permuted, window_offsets, window_order
from ...vision.guard import images, poisoned
from ...vision.host_grids import HostGrids, token_count
from ...vision.kernels.aligned_linear import aligned_linear, is_misaligned
from ...vision.kernels.packed_attention import DTYPES, PackedSegments, packed_attention
from ..attributes import overridden
from ..kernels.saved_tensors import known_activations
from .hugging_face import held_as, refuse_checkpointing, result, returns_an_object
from .patch_gradients import patch_gradients

WINDOW_ATTENTION = "Qwen2_5_VLVisionAttention"


class Qwen25VLEncoder(GridProgram):
    """Everything from patches to merged embeddings, in one region.

    Layers get `PackedSegments` where upstream passes `cu_seqlens`; `kernels` must let attention take them.

    Args:
        model: Hugging Face's `Qwen2_5_VisionTransformerPretrainedModel`.
        exact_below: Batches of up to this many tokens must fill a bucket exactly.
        kernels: Entered around the recorded forward.
    """

    def __init__(self, model: UpstreamModule, exact_below: int = 0, kernels: RecordingKernels = nullcontext) -> None:
        super().__init__(model, exact_below, kernels)
        self._side: int = model.window_size // self.merge // model.patch_size

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Output: embeddings `[tokens / merge**2, width]`."""
        model, grid = self.model, images(buffers["grid"])
        frames, windows = self._segments(grid, bucket)
        cells = bucket.tokens // self.merge**2
        order = window_order(grid, cells, self.merge, self._side)
        hidden = model.patch_embed(buffers["pixels"])
        hidden = permuted(hidden.view(cells, -1), order.order, order.place).view(bucket.tokens, -1)
        angles = poisoned(model.rotary_pos_emb(order.positions), buffers["grid"])
        angles = torch.cat((angles, angles), dim=-1)
        rotation = angles.cos(), angles.sin()
        for index, block in enumerate(model.blocks):
            segments = frames if index in model.fullatt_block_indexes else windows
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=rotation)
        return (permuted(model.merger(hidden), order.place, order.order),)

    def _segments(self, grid: Tensor, bucket: Bucket) -> tuple[PackedSegments, PackedSegments]:
        """Return where frames and where windows lie."""
        frames, largest = bucket.limits
        windows = most_windows(bucket.tokens // self.merge**2, frames, self._side)
        tokens = min((self._side * self.merge) ** 2, largest)
        return (
            PackedSegments(segment_offsets(grid, frames), largest),
            PackedSegments(window_offsets(grid, windows, self.merge, self._side), tokens),
        )

    def output_rows(self, batch: VisionBatch) -> tuple[int, ...]:
        """See `RegionProgram`."""
        return (batch.tokens // self.merge**2,)


class Qwen25VLAdapter:
    """See `EncoderAdapter`.

    Args:
        model: Hugging Face's `Qwen2_5_VisionTransformerPretrainedModel`.

    Raises:
        OptionError: The model checkpoints its layers, or computes in a type that packed attention does not take.
    """

    unit_of = "one embedding"
    deterministic_tokens = math.inf

    def __init__(self, model: UpstreamModule) -> None:
        refuse_checkpointing(model)
        _refuse_precision(model.patch_embed.proj.weight)
        self._model = model
        self._patch = patch_shape(model.config)
        self._merge: int = model.config.spatial_merge_size
        self.unit = self._merge**2

    def read(self, grids: HostGrids, hidden_states: Tensor, grid_thw: Tensor, **others: Any) -> Call:
        """See `EncoderAdapter`. With fewer patches than the grid describes, eager reads out of bounds on the device."""
        batch = read_patches(grids, hidden_states, grid_thw, self._patch, self._model.patch_embed.proj.weight.device)
        misfit = patches_misfit(batch, self._merge)
        if token_count(batch.rows) != batch.tokens:
            raise BatchError(misfit)
        return encoder_call(batch, returns_an_object(others), misfit)

    def run(self, forward: Callable[..., Any], batch: VisionBatch) -> Any:
        """See `EncoderAdapter`."""
        return forward(batch.pixels, grid_thw=batch.grid, return_dict=True)

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """See `EncoderAdapter`."""
        return (returned.pooler_output,)

    def returned(self, outputs: Sequence[Tensor]) -> Any:
        """See `EncoderAdapter`."""
        return result(pooler_output=outputs[0])

    def bounds(self, capacity: int, frames: int, directly: bool) -> list[tuple[int, ...]]:
        """See `EncoderAdapter`: kernels look at every frame as if it were the largest, and leave where it is not."""
        return [*scanned_limits(capacity, frames)]

    def program(self, exact_below: int, kernels: RecordingKernels) -> RegionProgram:
        """See `EncoderAdapter`."""
        return Qwen25VLEncoder(self._model, exact_below, kernels)


def _refuse_precision(weight: Tensor) -> None:
    if weight.device.type == "cuda" and weight.dtype not in DTYPES:
        raise OptionError(
            "model.params_dtype",
            weight.dtype,
            "torch.bfloat16 or torch.float16 with vision graphs of Qwen2.5-VL",
            "Its windows attend in PyTorch's packed flash kernels. Train in bf16, or switch vision graphs off.",
        )


@contextmanager
def packed_window_attention(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let Qwen2.5-VL's attention take `PackedSegments` while a region of these modules is recorded.

    Hugging Face's own reads the offsets on the host and attends segment by segment, or hands the longest segment's
    length over as a device tensor.
    """
    with ExitStack() as stack:
        for module in every_module(modules):
            if type(module).__name__ == WINDOW_ATTENTION:
                stack.enter_context(overridden(module, "forward", partial(_packed_forward, module)))
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
                stack.enter_context(overridden(module, "forward", partial(_aligned_forward, module)))
        yield


@contextmanager
def reordering_kernels(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let Qwen2.5-VL's modules call kernels that round a gradient otherwise than eager does."""
    with aligned_backward(modules), patch_gradients(modules):
        yield


def _aligned_forward(linear: nn.Linear, x: Tensor) -> Tensor:
    return aligned_linear(x, linear.weight, linear.bias)


QWEN25_VL = EncoderFamily(
    name="Qwen2.5-VL",
    find=held_as("visual", "Qwen2_5_VisionTransformerPretrainedModel"),
    adapt=Qwen25VLAdapter,
    kernels=packed_window_attention,
    reordering_kernels=reordering_kernels,
    known_activations=known_activations,
)
