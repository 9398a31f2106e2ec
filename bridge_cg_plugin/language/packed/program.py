"""A decoder's layers, or a part of one layer, over packed documents or padded rows as a region."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...attention_bounds import refuse_pack
from ...graphs.buckets import Bucket
from ...graphs.fallback import Fallback
from ...graphs.program import Buffers, PartCall, RegionProgram, TensorSpec
from ...graphs.rows import fill_segments, leading, write_offsets, write_rows
from .batch import OFFSETS, PADDED_OFFSETS, PackedBatch, PackShape, token_angles

# Inputs that say how a pack is made: the same for all parts of a decoder's layers.
SHARED = ("angles", "by_place", "used", *OFFSETS, *PADDED_OFFSETS)
UNCHANGED, OVERFLOW = "unchanged", "overflow"
# Called with a program's modules.
RecordingKernels = Callable[[Sequence[nn.Module]], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class RecordedPack:
    """What a recorded piece of a decoder sees: buffers, and constants of the recording.

    Attributes:
        hidden: `[tokens of this rank, 1, width]`; of padded rows `[tokens of each, rows, width]`.
        angles: Rotary angles of every token; None where nothing is rotated.
        offsets: `cu_seqlens` by name, each `[documents + 1]` int32; none of padded rows.
        longest: Bound of a document's length in tokens.
        additions: Like `hidden` each, added behind the first layers.
        used: `[1]` int32, how many of this rank's tokens are no padding; None where no layer asks.
        unchanged: `[1]` float32, 1 where weights are as they were quantized last; None where none are quantized.
        overflow: `[1]` int32, counted up where experts have too little room; None where they have room for all.
        biases: Of attention, each `[rows, 1, tokens of each, tokens of each]`.
    """

    hidden: Tensor
    angles: Tensor | None
    offsets: Mapping[str, Tensor]
    longest: int
    additions: Sequence[Tensor] = ()
    used: Tensor | None = None
    unchanged: Tensor | None = None
    overflow: Tensor | None = None
    biases: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class DecoderPart:
    """A piece of a decoder that becomes a region of its own.

    Attributes:
        name: Of the region.
        owner: The layer; the decoder itself for all layers.
        uses: Names of the owner's submodules whose parameters the piece uses; none are all of them.
        run: The piece. Every output has as many rows as the hidden states.
        calls: See `Piece`.
        routes: Whether the piece gives what a router makes of the hidden states.
        counted: Whether the piece must know how many tokens are no padding.
        changed: Returns whether a replay has to quantize the weights, which changed; it is taken to do so. None where
            the piece quantizes none.
    """

    name: str
    owner: nn.Module
    uses: Sequence[str]
    run: Callable[[RecordedPack], tuple[Tensor, ...]]
    calls: Sequence[PartCall] = ()
    routes: bool = False
    counted: bool = False
    changed: Callable[[], bool] | None = None

    def roots(self) -> list[nn.Module]:
        """Return the modules whose parameters the piece uses now: a layer's submodules may be replaced."""
        return [self.owner.get_submodule(name) for name in self.uses or ("",)]


class PackLayout(NamedTuple):
    """What does not change between the microbatches of one recording.

    Attributes:
        offsets: Names of the `cu_seqlens` that a batch has; none of padded rows.
        rotated: Width of a row of rotary angles; 0 where nothing is rotated.
        width, dtype: Of the hidden states.
    """

    offsets: tuple[str, ...]
    rotated: int
    width: int
    dtype: torch.dtype


class PackedProgram(RegionProgram):
    """A piece of a decoder whose inputs are hidden states of packed documents or padded rows.

    Buckets of packs have the limits (documents, tokens of the longest document). Padding tokens lie behind the last
    offset. Under context parallelism, where attention must know every token's document, they are one more document.
    Buckets of padded rows have the limits (rows, tokens of each) and take as many rows that were given that room.

    Args:
        part: The piece.
        layout: What all microbatches of the recordings share.
        family: The decoder's upstream side: how ranks share a pack, and how angles come.
        additions: Behind how many of the first layers something is added to the hidden states.
        exact_below: Packs of up to this many tokens on a rank must fill a bucket exactly.
        kernels: Entered around recorded work.
    """

    def __init__(
        self,
        part: DecoderPart,
        layout: PackLayout,
        family: Any,
        additions: int,
        exact_below: int,
        kernels: RecordingKernels,
    ) -> None:
        self.name, self.layout, self._family = part.name, layout, family
        self._additions = tuple(f"addition_{index}" for index in range(additions))
        self._biases = tuple(f"bias_{index}" for index in range(family.biases))
        self._part, self._exact_below, self._kernels = part, exact_below, kernels

    def modules(self) -> Sequence[nn.Module]:
        """See `RegionProgram`."""
        return self._part.roots()

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        documents, layout, family = bucket.limits[0], self.layout, self._family
        sequences = 1 if layout.offsets else bucket.limits[0]
        each = bucket.tokens // sequences
        tokens = each // (family.shards * family.ranks)
        rows = TensorSpec((tokens, sequences, layout.width), layout.dtype, differentiable=True)
        bounded = getattr(family.exchange, "bounds", None) is not None
        count = documents + 1 + (family.ranks > 1)
        return {
            "hidden": rows,
            **dict.fromkeys(self._additions, rows),
            **dict.fromkeys(self._biases, TensorSpec((sequences, 1, each, each), layout.dtype)),
            **self._angle_specs(each, sequences),
            **{name: TensorSpec((count,), torch.int32) for name in layout.offsets},
            **({OVERFLOW: TensorSpec((1,), torch.int32)} if bounded else {}),
            **({"used": TensorSpec((1,), torch.int32)} if self._part.counted else {}),
            **({} if self._part.changed is None else {UNCHANGED: TensorSpec((1,), torch.float32)}),
        }

    def size(self, batch: PackedBatch) -> int:
        """See `RegionProgram`."""
        tokens, rows, _ = batch.hidden.shape
        return batch.tokens if self.layout.offsets else tokens * rows * self._family.shards

    def refuse(self, batch: PackedBatch, bucket: Bucket) -> Fallback | None:
        """See `RegionProgram`."""
        reasons = (self._refuse_shape(shape, bucket) for shape in batch.each)
        return next((reason for reason in reasons if reason is not None), None)

    def _refuse_shape(self, shape: PackShape, bucket: Bucket) -> Fallback | None:
        layout = self.layout
        known = shape.layout == layout.offsets and shape.rotated == layout.rotated
        if not known or len(shape.additions) > len(self._additions):
            return Fallback.OTHER_LAYOUT
        if not layout.offsets:
            return None if shape.rows == bucket else Fallback.OTHER_SHAPES
        if shape.tokens > bucket.tokens:
            return Fallback.TOO_MANY_TOKENS
        return refuse_pack(
            shape.lengths, shape.tokens, self._exact_below, bucket, self._family.shards, self._family.ranks
        )

    def overflow(self, buffers: Buffers) -> Tensor | None:
        """See `RegionProgram`."""
        return buffers.get(OVERFLOW)

    def load(self, buffers: Buffers, batch: PackedBatch) -> None:
        """See `RegionProgram`. What parts of layers share is written with the first of them."""
        if OVERFLOW in buffers:
            buffers[OVERFLOW].zero_()
        _load_rows(buffers["hidden"], batch.hidden.detach())
        if self._part.changed is not None:
            buffers[UNCHANGED].fill_(not self._part.changed())
        if batch.loaded:
            return
        for name, rows in zip(self._additions, self._padded_additions(batch), strict=True):
            _load_rows(buffers[name], rows.detach())
        for name, bias in zip(self._biases, batch.biases, strict=True):
            buffers[name].copy_(bias)
        if self._part.counted:
            buffers["used"].fill_(batch.hidden.shape[0] * batch.hidden.shape[1])
        if batch.angles is not None:
            _load_rows(buffers["angles"], batch.angles)
            buffers["by_place"].fill_(batch.by_place)
        for name in self.layout.offsets:
            write_offsets(buffers[name], batch.offsets[name], self._end(name, buffers["hidden"].shape[0]))

    def _end(self, name: str, rows: int) -> int | None:
        """Return where a last document of padding ends; None where padding is in no document."""
        capacity = rows * self._family.shards * self._family.ranks
        return capacity if self._family.ranks > 1 and name in self._physical else None

    @property
    def _physical(self) -> tuple[str, ...]:
        """Names of the offsets that say where documents lie."""
        return PADDED_OFFSETS if PADDED_OFFSETS[0] in self.layout.offsets else OFFSETS

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """See `RegionProgram`."""
        angles = ("angles", "by_place") if self.layout.rotated else ()
        for name in ("hidden", *self._additions, *self._biases, *angles):
            buffers[name].zero_()
        if self._part.counted:
            buffers["used"].fill_(buffers["hidden"].shape[0] * buffers["hidden"].shape[1])
        if self._part.changed is not None:
            buffers[UNCHANGED].fill_(True)
        tokens = longest = min(bucket.tokens, bucket.limits[1])
        if self._family.ranks > 1:
            tokens, chunks = bucket.tokens, 2 * self._family.ranks
            longest = longest // chunks * chunks
        for name in self.layout.offsets:
            fill_segments(buffers[name], tokens, longest)

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Outputs have `tokens / (shards * ranks)` rows."""
        offsets = {name: buffers[name] for name in self.layout.offsets}
        angles = buffers.get("angles")
        if angles is not None and offsets and self._family.per_position:
            physical = offsets[self._physical[0]]
            angles = token_angles(angles, buffers["by_place"], physical, self._family.ranks, self._family.rank)
        additions = [buffers[name] for name in self._additions]
        biases = [buffers[name] for name in self._biases]
        used, unchanged, overflow = map(buffers.get, ("used", UNCHANGED, OVERFLOW))
        hidden, longest = buffers["hidden"], bucket.limits[1]
        pack = RecordedPack(hidden, angles, offsets, longest, additions, used, unchanged, overflow, biases)
        return self._part.run(pack)

    def recording(self) -> AbstractContextManager[None]:
        """See `RegionProgram`."""
        return self._kernels(self._part.roots())

    def output_rows(self, batch: PackedBatch, bucket: Bucket, outputs: Sequence[Tensor]) -> tuple[int, ...]:
        """See `RegionProgram`. A router has a row for each token of padded rows."""
        if self.layout.offsets:
            return (batch.hidden.shape[0],) * len(outputs)
        return super().output_rows(batch, bucket, outputs)

    def differentiable_inputs(self, batch: PackedBatch) -> tuple[Tensor, ...]:
        """See `RegionProgram`."""
        return (batch.hidden, *self._padded_additions(batch))

    def _angle_specs(self, tokens: int, sequences: int) -> dict[str, TensorSpec]:
        if not self.layout.rotated:
            return {}
        # A table of positions is the same on all ranks; angles of tokens are those of a rank's own.
        rows = tokens if self._family.per_position else tokens // self._family.ranks
        angles = TensorSpec((rows, sequences, 1, self.layout.rotated), torch.float32)
        return {"angles": angles, "by_place": TensorSpec((1,), torch.bool)}

    def _padded_additions(self, batch: PackedBatch) -> tuple[Tensor, ...]:
        """Return as many additions as are recorded; those that the batch lacks have no rows, which is zeros."""
        missing = len(self._additions) - len(batch.additions)
        return (*batch.additions, *(batch.hidden.detach()[:0],) * missing)


def _load_rows(buffer: Tensor, rows: Tensor) -> None:
    """Write as many rows as there is room for and zero the rest."""
    write_rows(buffer, leading(rows, min(rows.shape[0], buffer.shape[0])))
