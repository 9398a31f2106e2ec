"""Qwen3-VL's language model (dense) as a region: the layers, the output layer and the loss of every token."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...graphs.fallback import Fallback
from ...graphs.planning.buckets import Bucket
from ...graphs.program import Buffers, TensorSpec
from ...graphs.replays.replay import want_gradients
from ...graphs.rows import write_rows

DIFFERENTIABLE = "decoder_input"
POSITIONS = "visual_pos_masks"
DEEPSTACK = "deepstack_visual_embeds"


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The arguments of one call.

    Attributes:
        decoder_input: `[sequence, batch, hidden]` embeddings of tokens and images.
        visual: `[batch, sequence]` bool, where an image's embedding stands; None without images.
        deepstack: `[images' tokens, hidden]` each: features that the first layers add there; empty without images.
        tensors: Further tensors, by argument: positions, labels, masks.
        constants: Every other argument; a graph is right for these values only.
    """

    decoder_input: Tensor
    visual: Tensor | None
    deepstack: tuple[Tensor, ...]
    tensors: Mapping[str, Tensor]
    constants: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """Tokens, padding of sequences included."""
        return self.decoder_input.shape[0] * self.decoder_input.shape[1]

    @property
    def bucket(self) -> Bucket:
        """What it is recorded for: its tokens, in this many sequences of this length."""
        sequence, batch, _ = self.decoder_input.shape
        return Bucket(sequence * batch, (batch, sequence))

    def shapes(self) -> "Microbatch":
        """Return a microbatch of the same shapes, types and constants that keeps no memory of a device."""
        tensors = {name: tensor.detach().to("meta") for name, tensor in self.tensors.items()}
        return Microbatch(self.decoder_input.detach().to("meta"), None, (), tensors, self.constants)

    def fits(self, other: "Microbatch") -> Fallback | None:
        """Return why this microbatch cannot use what was captured for another, or None if it can."""
        if self.constants != other.constants:
            return Fallback.CALL_ARGUMENTS
        ours, theirs = ({**m.tensors, DIFFERENTIABLE: m.decoder_input} for m in (self, other))
        same = ours.keys() == theirs.keys() and all(
            (t.shape, t.dtype) == (theirs[name].shape, theirs[name].dtype) for name, t in ours.items()
        )
        if not same:
            return Fallback.OTHER_SHAPES
        return Fallback.INPUT_GRADIENTS if want_gradients(self.tensors.values()) else None


def read_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Microbatch | None:
    """Return the microbatch of a call, or None if it is not one that a graph could take."""
    decoder_input = kwargs.get(DIFFERENTIABLE)
    rest = {name: value for name, value in kwargs.items() if name not in (DIFFERENTIABLE, POSITIONS, DEEPSTACK)}
    tensors = {name: value for name, value in rest.items() if isinstance(value, Tensor)}
    constants = {name: value for name, value in rest.items() if name not in tensors}
    plain = all(value is None or isinstance(value, bool | int | float | str) for value in constants.values())
    if args or not isinstance(decoder_input, Tensor) or not plain:
        return None
    return Microbatch(decoder_input, kwargs.get(POSITIONS), tuple(kwargs.get(DEEPSTACK) or ()), tensors, constants)


# Called with the language model and the modules of the region; entered around recorded work.
Recording = Callable[[nn.Module, Sequence[nn.Module]], AbstractContextManager[None]]


class LanguageModel:
    """The language model's forward over static inputs; its output is the loss of every token, `[batch, sequence]`.

    Images reach it as embeddings in `decoder_input`, and as deepstack features that the first layers add to the tokens
    of images. How many tokens those are changes from batch to batch: the features fill the first rows of a buffer with
    a row for every token, and a permutation computed inside the graph brings them to their places, zeros elsewhere.

    Args:
        model: Bridge's `Qwen3VLGPTModel`, or one with the same parts.
        forward: The model's eager forward.
        examples: A microbatch of each bucket, whose shapes and types are recorded; all have the same constants. Others
            may come later.
        deepstack: How many layers add features.
        recording: Makes upstream's block add dense features, and what else recording needs.
    """

    name = "language_model"

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Tensor],
        examples: Mapping[Bucket, Microbatch],
        deepstack: int,
        recording: Recording,
    ) -> None:
        self.model = model
        self._forward = forward
        self._recording = recording
        self._deepstack = tuple(f"{DEEPSTACK}.{index}" for index in range(deepstack))
        self._examples = examples

    def modules(self) -> Sequence[nn.Module]:
        """See `RegionProgram`. The embedding runs eager, so its weight is not the region's, unless it is tied."""
        tied = self.model.share_embeddings_and_output_weights
        return [module for name, module in self.model.named_children() if tied or name != "embedding"]

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        example = self._examples[bucket]
        hidden = example.decoder_input
        sequence, batch, width = hidden.shape
        rows = TensorSpec((sequence * batch, width), hidden.dtype, differentiable=True)
        return {
            DIFFERENTIABLE: TensorSpec(tuple(hidden.shape), hidden.dtype, differentiable=True),
            **dict.fromkeys(self._deepstack, rows),
            POSITIONS: TensorSpec((batch, sequence), torch.bool),
            **{name: TensorSpec(tuple(t.shape), t.dtype) for name, t in example.tensors.items()},
        }

    def size(self, batch: Microbatch) -> int:
        """See `RegionProgram`."""
        return batch.tokens

    def refuse(self, batch: Microbatch, bucket: Bucket) -> Fallback | None:
        """See `RegionProgram`: nothing is padded."""
        return None if batch.bucket == bucket else Fallback.OTHER_SHAPES

    def load(self, buffers: Buffers, batch: Microbatch) -> None:
        """See `RegionProgram`."""
        buffers[DIFFERENTIABLE].copy_(batch.decoder_input.detach())
        if batch.visual is None:
            buffers[POSITIONS].zero_()
        else:
            buffers[POSITIONS].copy_(batch.visual)
        for name, features in zip(self._deepstack, self._features(batch), strict=True):
            write_rows(buffers[name], features.detach())
        for name, tensor in batch.tensors.items():
            buffers[name].copy_(tensor, non_blocking=True)

    def _features(self, batch: Microbatch) -> tuple[Tensor, ...]:
        """The deepstack features; those that the batch lacks, all of them without images, have no rows."""
        missing = len(self._deepstack) - len(batch.deepstack)
        empty = batch.decoder_input.new_empty((0, batch.decoder_input.shape[-1]))
        return (*batch.deepstack, *(empty,) * missing)

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """See `RegionProgram`."""
        for buffer in buffers.values():
            buffer.zero_()

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`."""
        sequence, batch, width = buffers[DIFFERENTIABLE].shape
        example = self._examples[bucket]
        order = dense_order(buffers[POSITIONS])
        features = [
            buffers[name].index_select(0, order).view(batch, sequence, width).transpose(0, 1)
            for name in self._deepstack
        ]
        loss = self._forward(
            decoder_input=buffers[DIFFERENTIABLE],
            visual_pos_masks=buffers[POSITIONS],
            deepstack_visual_embeds=features or None,
            **{name: buffers[name] for name in example.tensors},
            **example.constants,
        )
        return (loss,)

    def recording(self) -> AbstractContextManager[None]:
        """See `RegionProgram`."""
        return self._recording(self.model, self.modules())

    def output_rows(self, batch: Microbatch) -> tuple[int, ...]:
        """See `RegionProgram`."""
        return (batch.decoder_input.shape[1],)

    def differentiable_inputs(self, batch: Microbatch) -> tuple[Tensor, ...]:
        """See `RegionProgram`."""
        return batch.decoder_input, *self._features(batch)


def dense_order(visual: Tensor) -> Tensor:
    """Return for every token, batch by batch, the row of a buffer whose first rows belong to the visual tokens.

    It is a permutation: other tokens take the remaining rows in order, so that no row's gradient is a sum.

    Args:
        visual: `[batch, sequence]` bool.

    Returns:
        `[batch * sequence]` int64.
    """
    flat = visual.flatten()
    first = flat.cumsum(0)
    others = (~flat).cumsum(0) + first[-1]
    return torch.where(flat, first, others) - 1
