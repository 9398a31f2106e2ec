"""Nemotron's vision encoder, megatron-core's RADIO: the layers are captured, what embeds patches runs eager.

In training RADIO may draw a crop of its position embeddings for every image. Draws, positions and class tokens stay
upstream's own code, and the region begins where the layers do. It returns the gradient of what enters them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...attention_bounds import DETERMINISTIC_TOKENS, frame_limits, scanned_limits
from ...graphs.fallback import Fallback
from ...graphs.instance import own_method
from ...graphs.planning.buckets import GRANULARITY, Bucket, round_up
from ...graphs.program import Buffers, RegionProgram, TensorSpec
from ...graphs.rows import write_rows
from ...graphs.workload import Call
from ...options import OptionError
from ...upstream_types import UpstreamModule
from ...vision.adapter import EncoderFamily, OtherAttention, RecordingKernels, encoder_call
from ...vision.batch import EmbeddedImages, HostGrids, check_device
from ...vision.fit import refuse_images
from ...vision.guard import guarded_shape, images, poisoned, write_guarded
from ..kernels.layers import fused_layer_kernels, fused_layernorm_backward, kernels_available, splits_without_copies
from ..kernels.precompile import compilations
from ..kernels.saved_tensors import known_activations
from ..kernels.side_products import side_workspace
from ..kernels.transformer_engine import accumulate_from_now_on, device_lengths, forget_attention_selection
from ..random_states import usable_random_states
from .direct_attention import (
    direct_attention,
    direct_attention_refusal,
    flash_attention,
    flash_attention_refusal,
)
from .qwen3_vl import accumulating_products, pack_segments

# Tokens of an image where all have one size, by layers: those do not know their tower, which does.
_image_tokens: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


class RadioLayers:
    """RADIO's layers on hidden states.

    Args:
        layers: megatron-core's `TransformerBlock` of a `RADIOViTModel`.
        exact_below: Batches of up to this many tokens must fill a bucket exactly.
        kernels: Entered around the recorded forward.
    """

    name = "vision_encoder"

    def __init__(self, layers: UpstreamModule, exact_below: int = 0, kernels: RecordingKernels = nullcontext) -> None:
        self.layers = layers
        self._exact_below = exact_below
        self._kernels = kernels
        self._dtype: torch.dtype = next(layers.parameters()).dtype

    def modules(self) -> Sequence[nn.Module]:
        """See `RegionProgram`."""
        return (self.layers,)

    def hidden(self, *shape: int) -> TensorSpec:
        """Return the static input of hidden states of this shape, without their width."""
        return TensorSpec((*shape, self.layers.config.hidden_size), self._dtype, differentiable=True)

    def run(self, hidden: Tensor, segments: Any = None) -> Tensor:
        """Call the layers' own forward."""
        found: Tensor = own_method(self.layers, "forward")(hidden, None, packed_seq_params=segments)
        return found

    def size(self, batch: EmbeddedImages) -> int:
        """See `RegionProgram`."""
        return batch.tokens

    def refuse(self, batch: EmbeddedImages, bucket: Bucket) -> Fallback | None:
        """See `RegionProgram`: images of one size do not see each other, and fill a bucket or leave room for more."""
        return None

    def load(self, buffers: Buffers, batch: EmbeddedImages) -> None:
        """See `RegionProgram`."""
        write_rows(buffers["hidden"], batch.pixels.detach())

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """See `RegionProgram`."""
        buffers["hidden"].zero_()

    def recording(self) -> AbstractContextManager[None]:
        """See `RegionProgram`."""
        return self._kernels(self.modules())

    def output_rows(self, batch: EmbeddedImages) -> tuple[int, ...]:
        """See `RegionProgram`."""
        return (batch.pixels.shape[0],)

    def differentiable_inputs(self, batch: EmbeddedImages) -> tuple[Tensor, ...]:
        """See `RegionProgram`."""
        return (batch.pixels,)


class TileLayers(RadioLayers):
    """RADIO's layers on images of one size. Buckets have no limits.

    Args:
        layers: See `RadioLayers`.
        tokens: Of an image.
        room: What an image counts in sizes.
        kernels: See `RadioLayers`.
    """

    def __init__(self, layers: UpstreamModule, tokens: int, room: int, kernels: RecordingKernels = nullcontext) -> None:
        super().__init__(layers, kernels=kernels)
        self._tokens, self._room = tokens, room

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        return {"hidden": self.hidden(bucket.tokens // self._room, self._tokens)}

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Output: hidden states `[images, tokens, width]`."""
        return (self.run(buffers["hidden"].transpose(0, 1).contiguous()).transpose(0, 1),)


class PackedLayers(RadioLayers):
    """RADIO's layers on images of any size. Buckets have the limits (images, tokens of the largest)."""

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        lengths = TensorSpec(guarded_shape(bucket.limits[0]), torch.int64)
        return {"hidden": self.hidden(bucket.tokens, 1), "lengths": lengths}

    def refuse(self, batch: EmbeddedImages, bucket: Bucket) -> Fallback | None:
        """See `RegionProgram`."""
        return refuse_images(batch.shape, self._exact_below, bucket)

    def load(self, buffers: Buffers, batch: EmbeddedImages) -> None:
        """See `RegionProgram`."""
        super().load(buffers, batch)
        assert batch.offsets is not None
        write_guarded(buffers["lengths"], functional.pad(batch.offsets.diff()[:, None], (2, 0), value=1), batch.rows)

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """See `RegionProgram`."""
        super().load_example(buffers, bucket)
        image = (1, 1, min(bucket.tokens, bucket.limits[1]))
        write_guarded(buffers["lengths"], torch.tensor([image]), (image,))

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Output: hidden states `[tokens, 1, width]`."""
        guarded = buffers["lengths"]
        offsets = functional.pad(images(guarded)[:, 2].cumsum(0), (1, 0)).to(torch.int32)
        hidden = poisoned(buffers["hidden"], guarded)
        return (self.run(hidden, pack_segments(offsets, bucket.limits[1])),)


# Settings of the layers that no graph takes -> the field of Bridge's provider that they come from, and the reason.
_ACTIVATIONS = "Its activations are in graph memory."
_WEIGHTS = "Weights are quantized only in the first microbatch of a step."
_REFUSED = {
    "recompute_granularity": ("model.recompute_vision", _ACTIVATIONS),
    "cpu_offloading": ("model.cpu_offloading", _ACTIVATIONS),
    "fine_grained_activation_offloading": ("model.fine_grained_activation_offloading", _ACTIVATIONS),
    "fp8": ("model.fp8", _WEIGHTS),
    "fp4": ("model.fp4", _WEIGHTS),
}


def _check(config: Any) -> None:
    for name, (field, reason) in _REFUSED.items():
        value = getattr(config, name, None)
        if value:
            off, found = ("null", value) if reason is _WEIGHTS else ("false", True)
            remedy = f"{reason} Set it to {off}, or switch vision graphs off."
            raise OptionError(field, found, f"{off} with vision graphs of RADIO", remedy)


class _RadioAdapter:
    """What adapters of RADIO's layers have in common; see `EncoderAdapter`.

    Args:
        layers: megatron-core's `TransformerBlock` of a `RADIOViTModel`.

    Raises:
        OptionError: The layers are recomputed in the backward, offload activations or compute in fp8 or fp4.
    """

    def __init__(self, layers: UpstreamModule) -> None:
        _check(layers.config)
        self._layers = layers

    def _call(self, hidden: Any, batch: EmbeddedImages | None, usual: bool) -> Call:
        if batch is None or not isinstance(hidden, Tensor):
            return Call(None, Fallback.CALL_ARGUMENTS)
        weight = next(self._layers.parameters())
        check_device(hidden, weight.device)
        misfit = None
        if hidden.shape[-1] != self._layers.config.hidden_size or hidden.dtype != weight.dtype:
            width = self._layers.config.hidden_size
            misfit = (
                f"hidden_states are {hidden.dtype} {tuple(hidden.shape)}, the layers take {weight.dtype} of {width}"
            )
        return encoder_call(batch, usual, misfit or self._misfit(batch), input_gradients=True)

    def _misfit(self, batch: EmbeddedImages) -> str | None:
        return None

    def outputs(self, returned: Tensor) -> tuple[Tensor, ...]:
        """See `EncoderAdapter`."""
        return (returned,)

    def returned(self, outputs: Sequence[Tensor]) -> Tensor:
        """See `EncoderAdapter`."""
        return outputs[0]


class TileAdapter(_RadioAdapter):
    """Images of one size: hidden states `[tokens, images, width]`; see `_RadioAdapter`."""

    unit_of = "one image"
    deterministic_tokens = math.inf

    def __init__(self, layers: UpstreamModule) -> None:
        super().__init__(layers)
        self._tokens = _image_tokens[layers]
        # Class tokens would make multiples of an image's tokens that are round numbers rare.
        self.unit = round_up(self._tokens, GRANULARITY)

    def read(
        self,
        grids: HostGrids,
        hidden_states: Any,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> Call:
        """See `EncoderAdapter`."""
        batch = None
        if isinstance(hidden_states, Tensor) and hidden_states.dim() == 3:
            rows = ((1, 1, self.unit),) * hidden_states.shape[1]
            batch = EmbeddedImages(hidden_states.transpose(0, 1), None, rows)
        return self._call(hidden_states, batch, attention_mask is None and packed_seq_params is None and not others)

    def _misfit(self, batch: EmbeddedImages) -> str | None:
        found = batch.pixels.shape[1]
        return None if found == self._tokens else f"an image has {found} tokens, the encoder's have {self._tokens}"

    def run(self, forward: Callable[..., Any], batch: EmbeddedImages) -> Any:
        """See `EncoderAdapter`."""
        return forward(batch.pixels.transpose(0, 1).contiguous(), attention_mask=None)

    def outputs(self, returned: Tensor) -> tuple[Tensor, ...]:
        """See `EncoderAdapter`."""
        return (returned.transpose(0, 1),)

    def returned(self, outputs: Sequence[Tensor]) -> Tensor:
        """See `EncoderAdapter`."""
        return outputs[0].transpose(0, 1)

    def bounds(self, capacity: int, frames: int, directly: bool) -> list[tuple[int, ...]]:
        """See `EncoderAdapter`: there are no limits besides the capacity."""
        return [()]

    def program(self, exact_below: int, kernels: RecordingKernels) -> RegionProgram:
        """See `EncoderAdapter`."""
        return TileLayers(self._layers, self._tokens, self.unit, kernels)


class PackedAdapter(_RadioAdapter):
    """Images of any size: hidden states `[tokens, 1, width]` with packed segments; see `_RadioAdapter`."""

    unit = 1
    unit_of = "one token"
    deterministic_tokens: float = DETERMINISTIC_TOKENS

    def read(
        self,
        grids: HostGrids,
        hidden_states: Any,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> Call:
        """See `EncoderAdapter`. A new tensor of offsets is read once."""
        offsets = getattr(packed_seq_params, "cu_seqlens_q", None)
        if not isinstance(offsets, Tensor) or not isinstance(hidden_states, Tensor) or hidden_states.dim() != 3:
            return self._call(hidden_states, None, usual=False)
        ends = grids.values(offsets)
        rows = tuple((1, 1, end - start) for start, end in zip(ends, ends[1:], strict=False))
        padded = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
        usual = attention_mask is None and padded is None and not others
        return self._call(hidden_states, EmbeddedImages(hidden_states, offsets, rows), usual)

    def _misfit(self, batch: EmbeddedImages) -> str | None:
        tokens, batch_size, _ = batch.pixels.shape
        if batch_size != 1 or batch.tokens != tokens or any(length < 1 for _, _, length in batch.rows):
            lengths = [length for _, _, length in batch.rows]
            return f"cu_seqlens_q describes images of {lengths} tokens, hidden_states have {tokens} x {batch_size}"
        return None

    def run(self, forward: Callable[..., Any], batch: EmbeddedImages) -> Any:
        """See `EncoderAdapter`."""
        assert batch.offsets is not None
        segments = pack_segments(batch.offsets, batch.shape.largest_frame)
        return forward(batch.pixels, attention_mask=None, packed_seq_params=segments)

    def bounds(self, capacity: int, frames: int, directly: bool) -> list[tuple[int, ...]]:
        """See `EncoderAdapter`."""
        return [*(scanned_limits if directly else frame_limits)(capacity, frames)]

    def program(self, exact_below: int, kernels: RecordingKernels) -> RegionProgram:
        """See `EncoderAdapter`."""
        return PackedLayers(self._layers, exact_below, kernels)


def find_layers(packed: bool) -> Callable[[nn.Module], nn.Module | None]:
    """Return a function that finds the layers of RADIO in a model; see `EncoderFamily`.

    Args:
        packed: Whether of one that takes images of any size, or else of one size.
    """

    def find(holder: nn.Module) -> nn.Module | None:
        inner = getattr(holder, "llava_model", holder)
        for tower in (getattr(inner, "vision_model", None), inner):
            names = {base.__name__ for base in type(tower).__mro__}
            found: UpstreamModule = tower
            if "RADIOViTModel" in names and getattr(found, "dynamic_resolution", False) is packed:
                layers: nn.Module = found.decoder
                _image_tokens[layers] = found.seq_length
                return layers
        return None

    return find


@contextmanager
def recording_kernels(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let recorded layers call the plugin's kernels, and choose attention without reading the device.

    Raises:
        CaptureError: Dropout draws from random states that a graph cannot use.
    """
    forget_attention_selection()
    fused = fused_layer_kernels(modules) if kernels_available() else nullcontext()
    with usable_random_states(modules), side_workspace(), fused, device_lengths(), splits_without_copies():
        yield


@contextmanager
def reordering_kernels(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let recorded layers call kernels that round a gradient otherwise than eager does."""
    with fused_layernorm_backward(modules) if kernels_available() else nullcontext():
        yield


def _family(name: str, packed: bool, adapt: Callable[[UpstreamModule], Any], **others: Any) -> EncoderFamily:
    return EncoderFamily(
        name=name,
        find=find_layers(packed),
        adapt=adapt,
        kernels=recording_kernels,
        reordering_kernels=reordering_kernels,
        compilations=compilations,
        fused_accumulation=accumulating_products,
        before_eager=accumulate_from_now_on,
        known_activations=known_activations,
        **others,
    )


RADIO = _family("RADIO", False, TileAdapter)
PACKED_RADIO = _family(
    "RADIO with images of any size",
    True,
    PackedAdapter,
    direct_attention=OtherAttention(direct_attention, direct_attention_refusal),
    flash_attention=OtherAttention(flash_attention, flash_attention_refusal),
)
