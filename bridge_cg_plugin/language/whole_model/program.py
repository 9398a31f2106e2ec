"""Qwen3-VL's language model (dense) as a region: the layers, the output layer and the loss of every token."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from ...graphs.buckets import Bucket
from ...graphs.fallback import Fallback
from ...graphs.program import Buffers, TensorSpec
from ...graphs.rows import write_rows
from .microbatch import DEEPSTACK, DIFFERENTIABLE, POSITIONS, Microbatch

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
        example: A microbatch, whose shapes, types and constants are recorded.
        deepstack: How many layers add features.
        recording: Makes upstream's block add dense features, and what else recording needs.
    """

    name = "language_model"

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[..., Tensor],
        example: Microbatch,
        deepstack: int,
        recording: Recording,
    ) -> None:
        self.model = model
        self._forward = forward
        self._recording = recording
        self._deepstack = tuple(f"{DEEPSTACK}.{index}" for index in range(deepstack))
        self._constants = dict(example.constants)
        self._tensors = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in example.tensors.items()}
        hidden = example.decoder_input
        self._hidden = TensorSpec(tuple(hidden.shape), hidden.dtype, differentiable=True)

    @property
    def bucket(self) -> Bucket:
        """What is recorded for: the tokens of a microbatch, in this many sequences."""
        sequence, batch, _ = self._hidden.shape
        return Bucket(sequence * batch, (batch,))

    def modules(self) -> Sequence[nn.Module]:
        """See `RegionProgram`. The embedding runs eager, so its weight is not the region's, unless it is tied."""
        tied = self.model.share_embeddings_and_output_weights
        return [module for name, module in self.model.named_children() if tied or name != "embedding"]

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        sequence, batch, width = self._hidden.shape
        rows = TensorSpec((sequence * batch, width), self._hidden.dtype, differentiable=True)
        return {
            DIFFERENTIABLE: self._hidden,
            **dict.fromkeys(self._deepstack, rows),
            POSITIONS: TensorSpec((batch, sequence), torch.bool),
            **self._tensors,
        }

    def size(self, batch: Microbatch) -> int:
        """See `RegionProgram`."""
        return batch.tokens

    def refuse(self, batch: Microbatch, bucket: Bucket) -> Fallback | None:
        """See `RegionProgram`: microbatches of other shapes do not get here."""
        return None

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
        """The deepstack features; without images there are none, and as many of no row stand for them."""
        if batch.deepstack:
            return batch.deepstack
        return (batch.decoder_input.new_empty((0, self._hidden.shape[-1])),) * len(self._deepstack)

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """See `RegionProgram`."""
        for buffer in buffers.values():
            buffer.zero_()

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`."""
        sequence, batch, width = self._hidden.shape
        order = dense_order(buffers[POSITIONS])
        features = [
            buffers[name].index_select(0, order).view(batch, sequence, width).transpose(0, 1)
            for name in self._deepstack
        ]
        loss = self._forward(
            decoder_input=buffers[DIFFERENTIABLE],
            visual_pos_masks=buffers[POSITIONS],
            deepstack_visual_embeds=features or None,
            **{name: buffers[name] for name in self._tensors},
            **self._constants,
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
