"""Qwen3-VL's language model (dense) as a region: the layers, the output layer and the loss of every token."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from ...graphs.fallback import Fallback
from ...graphs.planning.buckets import Bucket
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
