"""Nemotron's vision encoder, megatron-core's RADIO: the layers are captured, what embeds patches runs eager.

In training RADIO may draw a crop of its position embeddings for every image. Draws, positions and class tokens stay
upstream's own code, and the region begins where the layers do. It returns the gradient of what enters them.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...attention_bounds import DETERMINISTIC_TOKENS, attended_limits
from ...graphs.buckets import GRANULARITY, Bucket, round_up
from ...graphs.fallback import Fallback
from ...graphs.instance import own_method
from ...graphs.program import Buffers, Call, TensorSpec
from ...graphs.rows import write_rows
from ...language.packed.batch import OFFSETS
from ...options import OptionError
from ...upstream_types import UpstreamModule
from ...vision.batch import EncoderBatch, HostGrids, check_device, equal_images, shape_of
from ...vision.encoder import Encoder, encoder_call
from ...vision.guard import guarded_shape, images, poisoned, write_guarded
from ...vision.layout import offsets_of
from ..wrappers import pack_params
from .qwen3_vl import OVER_SEGMENTS, core_family

# Tokens of an image where all have one size, by layers: those do not know their tower, which does.
_image_tokens: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

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


class RadioLayers(Encoder):
    """The layers of a `RADIOViTModel`, megatron-core's `TransformerBlock`, on hidden states.

    Raises:
        OptionError: The layers are recomputed in the backward, offload activations or compute in fp8 or fp4.
    """

    def prepare(self) -> None:
        """See `Encoder`."""
        for name, (field, reason) in _REFUSED.items():
            if value := getattr(self.model.config, name, None):
                off, found = ("null", value) if reason is _WEIGHTS else ("false", True)
                remedy = f"{reason} Set it to {off}, or switch vision graphs off."
                raise OptionError(field, found, f"{off} with vision graphs of RADIO", remedy)

    @property
    def _weight(self) -> Tensor:
        weight: Tensor = next(self.model.parameters())
        return weight

    def hidden(self, *shape: int) -> TensorSpec:
        """Return the static input of hidden states of this shape, without their width."""
        return TensorSpec((*shape, self.model.config.hidden_size), self._weight.dtype, differentiable=True)

    def layers(self, hidden: Tensor, segments: Any = None) -> Tensor:
        """Call the layers' own forward."""
        found: Tensor = own_method(self.model, "forward")(hidden, None, packed_seq_params=segments)
        return found

    def load(self, buffers: Buffers, batch: EncoderBatch) -> None:
        """See `RegionProgram`."""
        write_rows(buffers["hidden"], batch.pixels.detach())

    def differentiable_inputs(self, batch: EncoderBatch) -> tuple[Tensor, ...]:
        """See `RegionProgram`."""
        return (batch.pixels,)

    def call(self, batch: EncoderBatch, usual: bool, misfit: str | None) -> Call:
        """Return what a call is; see `encoder_call`."""
        hidden, weight, width = batch.pixels, self._weight, self.model.config.hidden_size
        check_device(hidden, weight.device)
        if hidden.shape[-1] != width or hidden.dtype != weight.dtype:
            found = f"{hidden.dtype} {tuple(hidden.shape)}"
            misfit = f"hidden_states are {found}, the layers take {weight.dtype} of {width}"
        return encoder_call(batch, usual, misfit, input_gradients=True)


class TileLayers(RadioLayers):
    """Images of one size: hidden states `[tokens, images, width]`; see `RadioLayers`. Buckets have no limits."""

    unit_of = "one image"

    def prepare(self) -> None:
        """See `Encoder`."""
        super().prepare()
        self._tokens = _image_tokens[self.model]
        # Class tokens would make multiples of an image's tokens that are round numbers rare.
        self.unit = round_up(self._tokens, GRANULARITY)

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        return {"hidden": self.hidden(bucket.tokens // self.unit, self._tokens)}

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Output: hidden states `[images, tokens, width]`."""
        return (self.layers(buffers["hidden"].transpose(0, 1).contiguous()).transpose(0, 1),)

    def read(
        self,
        grids: HostGrids,
        hidden_states: Any,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> Call:
        """See `Encoder`."""
        if not isinstance(hidden_states, Tensor) or hidden_states.dim() != 3:
            return Call(None, Fallback.CALL_ARGUMENTS)
        found, count, _ = hidden_states.shape
        misfit = None if found == self._tokens else f"an image has {found} tokens, the encoder's have {self._tokens}"
        usual = attention_mask is None and packed_seq_params is None and not others
        return self.call(equal_images(hidden_states.transpose(0, 1), count, self.unit), usual, misfit)

    def outputs(self, returned: Tensor) -> tuple[Tensor, ...]:
        """See `Encoder`."""
        return (returned.transpose(0, 1),)

    def returned(self, outputs: Sequence[Tensor]) -> Tensor:
        """See `Encoder`."""
        return outputs[0].transpose(0, 1)


class PackedLayers(RadioLayers):
    """Images of any size: hidden states `[tokens, 1, width]` with packed segments; see `RadioLayers`.

    A batch's sizes are offsets `[images + 1]`. Buckets have the limits (images, tokens of the largest).
    """

    unit = 1
    unit_of = "one token"
    deterministic_tokens = DETERMINISTIC_TOKENS

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        lengths = TensorSpec(guarded_shape(bucket.limits[0]), torch.int64)
        return {"hidden": self.hidden(bucket.tokens, 1), "lengths": lengths}

    def load(self, buffers: Buffers, batch: EncoderBatch) -> None:
        """See `RegionProgram`."""
        super().load(buffers, batch)
        assert batch.sizes is not None
        write_guarded(buffers["lengths"], functional.pad(batch.sizes.diff()[:, None], (2, 0), value=1), batch.rows)

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """See `RegionProgram`."""
        super().load_example(buffers, bucket)
        image = (1, 1, min(bucket.tokens, bucket.limits[1]))
        write_guarded(buffers["lengths"], torch.tensor([image]), (image,))

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Output: hidden states `[tokens, 1, width]`."""
        guarded = buffers["lengths"]
        offsets = offsets_of(images(guarded)[:, 2])
        hidden = poisoned(buffers["hidden"], guarded)
        return (self.layers(hidden, pack_params(dict.fromkeys(OFFSETS, offsets), bucket.limits[1])),)

    def read(
        self,
        grids: HostGrids,
        hidden_states: Any,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> Call:
        """See `Encoder`. A new tensor of offsets is read once."""
        offsets = getattr(packed_seq_params, "cu_seqlens_q", None)
        if not isinstance(offsets, Tensor) or not isinstance(hidden_states, Tensor) or hidden_states.dim() != 3:
            return Call(None, Fallback.CALL_ARGUMENTS)
        ends = grids.values(offsets)
        rows = tuple((1, 1, end - start) for start, end in zip(ends, ends[1:], strict=False))
        padded = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
        usual = attention_mask is None and padded is None and not others
        batch = EncoderBatch(hidden_states, rows, shape_of(rows), offsets)
        return self.call(batch, usual, _misfit(batch))

    def bounds(self, capacity: int, frames: int, directly: bool) -> list[tuple[int, ...]]:
        """See `Encoder`."""
        return attended_limits(capacity, frames, directly)


def _misfit(batch: EncoderBatch) -> str | None:
    """Return how segments differ from the hidden states, None where they do not."""
    tokens, batch_size, _ = batch.pixels.shape
    lengths = [length for _, _, length in batch.rows]
    if batch_size != 1 or batch.tokens != tokens or any(length < 1 for length in lengths):
        return f"cu_seqlens_q describes images of {lengths} tokens, hidden_states have {tokens} x {batch_size}"
    return None


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


RADIO = core_family(name="RADIO", find=find_layers(packed=False), encoder=TileLayers)
PACKED_RADIO = core_family(
    name="RADIO with images of any size", find=find_layers(packed=True), encoder=PackedLayers, **OVER_SEGMENTS
)
