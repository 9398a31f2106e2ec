"""The attention part or the MLP part of one of megatron-core's transformer layers as a region."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...graphs.fallback import Fallback
from ...graphs.piece import CallSite
from ...graphs.planning.buckets import Bucket
from ...graphs.program import Buffers, TensorSpec
from ...graphs.replays.replay import want_gradients
from ...graphs.rows import fill_one_segment, write_offsets, write_rows
from ...upstream_types import UpstreamModule
from ...vision.adapter import LayerPart, RecordingKernels

# Builds the attention metadata of packed segments from cu_seqlens and the largest segment length.
PackSegments = Callable[[Tensor, int], Any]


@dataclass(frozen=True, slots=True)
class LayerBatch:
    """What a part of a layer gets for one microbatch.

    Attributes:
        hidden: `[tokens, 1, width]`.
    """

    hidden: Tensor

    @property
    def segments(self) -> int:
        """Segments that the part sees."""
        return 1


@dataclass(frozen=True, slots=True)
class AttentionBatch(LayerBatch):
    """What the attention part gets.

    Attributes:
        angles: `[tokens, 1, 1, head]` rotary angles, fp32.
        offsets: `[segments + 1]` int32 `cu_seqlens`.
    """

    angles: Tensor
    offsets: Tensor

    @property
    def segments(self) -> int:
        """Segments that the part sees."""
        return self.offsets.shape[0] - 1


class _LayerPart[Batch: LayerBatch]:
    def __init__(self, layer: UpstreamModule, name: str, exact_below: int, kernels: RecordingKernels) -> None:
        self.layer = layer
        self._kernels = kernels
        self._exact_below = exact_below
        self.name = name
        self._width: int = layer.config.hidden_size
        self._dtype: torch.dtype = next(layer.parameters()).dtype

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        return {"hidden": TensorSpec((bucket.tokens, 1, self._width), self._dtype, differentiable=True)}

    def size(self, batch: Batch) -> int:
        """See `RegionProgram`."""
        return batch.hidden.shape[0]

    def refuse(self, batch: Batch, bucket: Bucket) -> Fallback | None:
        """See `RegionProgram`."""
        tokens = self.size(batch)
        return Fallback.TOO_FEW_TOKENS if tokens <= self._exact_below and tokens != bucket.tokens else None

    def load(self, buffers: Buffers, batch: Batch) -> None:
        """See `RegionProgram`."""
        write_rows(buffers["hidden"], batch.hidden.detach())

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """See `RegionProgram`."""
        buffers["hidden"].zero_()

    def recording(self) -> AbstractContextManager[None]:
        """See `RegionProgram`."""
        return self._kernels((self.layer,))

    def output_rows(self, batch: Batch) -> tuple[int, ...]:
        """See `RegionProgram`."""
        return (batch.hidden.shape[0],)

    def differentiable_inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """See `RegionProgram`."""
        return (batch.hidden,)


class AttentionPart(_LayerPart[AttentionBatch]):
    """Norm, attention and residual of one layer. Buckets have the limit (frames,): a layer sees no frame's size.

    Args:
        layer: A megatron-core transformer layer.
        pack_segments: Builds upstream's attention metadata.
        exact_below: Batches of up to this many tokens must fill a bucket exactly.
        kernels: Entered around the recorded forward; swaps in faster kernels that compute the same.
    """

    def __init__(
        self,
        layer: UpstreamModule,
        pack_segments: PackSegments,
        exact_below: int = 0,
        kernels: RecordingKernels = nullcontext,
    ) -> None:
        super().__init__(layer, f"vision_attention_{layer.layer_number}", exact_below, kernels)
        self._forward_attention = layer._forward_attention
        self._pack_segments = pack_segments
        self._head: int = layer.config.kv_channels

    def modules(self) -> Sequence[nn.Module]:
        """See `RegionProgram`."""
        return (self.layer.input_layernorm, self.layer.self_attention)

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        return {
            **super().input_specs(bucket),
            "angles": TensorSpec((bucket.tokens, 1, 1, self._head), torch.float32),
            "offsets": TensorSpec((bucket.limits[0] + 1,), torch.int32),
        }

    def refuse(self, batch: AttentionBatch, bucket: Bucket) -> Fallback | None:
        """See `RegionProgram`."""
        if want_gradients((batch.angles,)):
            return Fallback.INPUT_GRADIENTS
        if batch.offsets.shape[0] > bucket.limits[0] + 1:
            return Fallback.TOO_MANY_FRAMES
        return super().refuse(batch, bucket)

    def load(self, buffers: Buffers, batch: AttentionBatch) -> None:
        """See `RegionProgram`."""
        super().load(buffers, batch)
        write_rows(buffers["angles"], batch.angles)
        write_offsets(buffers["offsets"], batch.offsets)

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """See `RegionProgram`."""
        super().load_example(buffers, bucket)
        buffers["angles"].zero_()
        fill_one_segment(buffers["offsets"], bucket.tokens)

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`."""
        hidden, _ = self._forward_attention(
            hidden_states=buffers["hidden"],
            attention_mask=None,
            rotary_pos_emb=buffers["angles"],
            packed_seq_params=self._pack_segments(buffers["offsets"], bucket.tokens),
        )
        return (hidden,)


class MlpPart(_LayerPart[LayerBatch]):
    """Norm, MLP and residual of one layer."""

    def __init__(self, layer: UpstreamModule, exact_below: int = 0, kernels: RecordingKernels = nullcontext) -> None:
        super().__init__(layer, f"vision_mlp_{layer.layer_number}", exact_below, kernels)
        self._forward_mlp = layer._forward_mlp

    def modules(self) -> Sequence[nn.Module]:
        """See `RegionProgram`."""
        return (self.layer.pre_mlp_layernorm, self.layer.mlp)

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`."""
        return (self._forward_mlp(buffers["hidden"]),)


def layer_parts(
    pack_segments: PackSegments, model: UpstreamModule, module: str, exact_below: int, kernels: RecordingKernels
) -> list[LayerPart]:
    """Return the attention ("attn") or the MLP ("mlp") of every layer of an encoder's `decoder`; see `LayerParts`.

    Args:
        pack_segments: Builds upstream's attention metadata.
        model: The encoder.
        module: Which part.
        exact_below: Batches of up to this many tokens must fill a bucket exactly.
        kernels: Entered around the recorded forward.
    """
    layers: Sequence[nn.Module] = model.decoder.layers
    if module == "attn":
        return [_attention(layer, pack_segments, exact_below, kernels) for layer in layers]
    return [_mlp(layer, exact_below, kernels) for layer in layers]


def _attention(layer: nn.Module, pack_segments: PackSegments, exact_below: int, kernels: RecordingKernels) -> LayerPart:
    site = CallSite(layer, "_forward_attention", lambda outputs: (outputs[0], None), read=_read_attention)
    return LayerPart(AttentionPart(layer, pack_segments, exact_below, kernels), site, lambda frames: (frames,))


def _mlp(layer: nn.Module, exact_below: int, kernels: RecordingKernels) -> LayerPart:
    return LayerPart(
        MlpPart(layer, exact_below, kernels),
        CallSite(layer, "_forward_mlp", read=lambda hidden, args, kwargs: LayerBatch(hidden)),
        lambda frames: (),
    )


def _read_attention(hidden: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AttentionBatch | None:
    packed: Any = kwargs.get("packed_seq_params")
    angles: Any = kwargs.get("rotary_pos_emb")
    if args or packed is None or angles is None or kwargs.get("context") is not None:
        return None
    return AttentionBatch(hidden, angles, packed.cu_seqlens_q)
