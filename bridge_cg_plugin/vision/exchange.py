"""Images of a microbatch to the data-parallel ranks that encode them, and their embeddings back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .balance import Plan, plan_moves
from .batch import VisionBatch
from .grids import Grid

# Most images and videos of a rank's microbatch that are told to the others; with more none move in that microbatch.
MOST_IMAGES = 128
NONE: Grid = ()

# An encoder: its outputs, `[patches / patches of an embedding, columns]` each.
Encode = Callable[[VisionBatch], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class MovableImages:
    """What travels between ranks that encode each other's images.

    Attributes:
        unit: Patches of one embedding.
        patch_width: Values of a patch.
        widths: Columns of the encoder's outputs.
        weight: A weight of the encoder; its type and device are the patches'.
    """

    unit: int
    patch_width: int
    widths: tuple[int, ...]
    weight: Tensor


class ImageExchange:
    """Levels the encoders' work of the ranks that hold the same weights.

    All of them call `encode` or `without_images` once for every microbatch, in the same order; none can go on before
    all did. What they say to each other then is the sizes of their images, in host memory. Only if a plan moves images
    do pixels travel, and embeddings back; gradients of embeddings go the way of the pixels.

    Args:
        sizes: The ranks, over a backend that takes host tensors.
        rows: The same ranks in the same order, over a backend that takes the encoder's; used for nothing else, so that
            what ranks without an image leave out elsewhere cannot disturb the order.
        share: Part of the largest rank's patches that moving must save.
        images: What images and embeddings are.
        trains: Whether the encoder trains anything, the same on all ranks.

    Attributes:
        moved: Images that other ranks encoded.
        microbatches: In which any image of any rank moved.
    """

    def __init__(
        self,
        sizes: distributed.ProcessGroup,
        rows: distributed.ProcessGroup,
        share: float,
        images: MovableImages,
        trains: Callable[[], bool],
    ) -> None:
        self._sizes, self._rows, self._share = sizes, rows, share
        self._images, self._trains = images, trains
        self._rank, self._world = distributed.get_rank(rows), distributed.get_world_size(rows)
        self.moved = self.microbatches = 0

    def encode(self, batch: VisionBatch, encode: Encode) -> tuple[Tensor, ...]:
        """Return the outputs of this rank's images, wherever they were encoded."""
        plan = plan_moves(self._gathered(batch.rows), self._share)
        if plan is None:
            return encode(batch)
        return self._encode_as_planned(plan, batch, encode)

    def without_images(self, encode: Encode) -> Tensor | None:
        """Take part in a microbatch in which this rank has no image.

        Returns:
            What the microbatch's loss must depend on, a zero, so that gradients of other ranks' images come by; None
            where no image moved.
        """
        plan = plan_moves(self._gathered(NONE), self._share)
        if plan is None:
            return None
        first, *others = self._encode_as_planned(plan, None, encode)
        return sum((output.sum() for output in others), first.sum())

    def _encode_as_planned(self, plan: Plan, batch: VisionBatch | None, encode: Encode) -> tuple[Tensor, ...]:
        self.moved += plan.moved
        self.microbatches += 1
        unit = self._images.unit
        sent, received = plan.sent(self._rank), plan.received(self._rank)
        order, own = plan.order(self._rank), plan.grids[self._rank]
        patches = self._in_order(self._patches(batch), [t * h * w for t, h, w in own], order)
        here = _Exchange.apply(patches, sent, received, self._rows)
        outputs = self._joined_outputs(here, plan.encoded(self._rank), encode)
        embeddings = [[count // unit for count in counts] for counts in (received, sent)]
        back = _Exchange.apply(outputs, *embeddings, self._rows)
        counts = [t * h * w // unit for t, h, w in own]
        back = self._in_order(back, [counts[place] for place in order], _inverse(order))
        return tuple(output.contiguous() for output in back.split(self._images.widths, dim=1))

    def _patches(self, batch: VisionBatch | None) -> Tensor:
        if batch is None:
            return self._images.weight.new_empty((0, self._images.patch_width))
        return batch.pixels.reshape(batch.tokens, -1).to(self._images.weight)

    def _joined_outputs(self, patches: Tensor, rows: Grid, encode: Encode) -> Tensor:
        """Return the outputs side by side; with or without images they take part in the backward alike."""
        if rows:
            grid = torch.tensor(rows)
            if patches.device.type == "cuda":
                grid = grid.pin_memory().to(patches.device, non_blocking=True)
            outputs = torch.cat(encode(VisionBatch(patches, grid, rows)), dim=1)
        else:
            outputs = self._images.weight.new_empty((0, sum(self._images.widths)))
        wanted = torch.is_grad_enabled() and self._trains()
        return outputs.requires_grad_() if wanted and not outputs.requires_grad else outputs

    def _gathered(self, rows: Grid) -> list[Grid]:
        """Return every rank's images; nobody's where one has too many to tell."""
        told = torch.zeros(1 + 3 * MOST_IMAGES, dtype=torch.int64)
        told[0] = len(rows)
        if 0 < len(rows) <= MOST_IMAGES:
            told[1 : 1 + 3 * len(rows)] = torch.tensor(rows).flatten()
        heard = torch.empty(self._world * len(told), dtype=torch.int64)
        distributed.all_gather_into_tensor(heard, told, group=self._sizes)
        found = [_rows(values) for values in heard.view(self._world, -1).tolist()]
        return [NONE] * self._world if None in found else found

    @staticmethod
    def _in_order(rows: Tensor, counts: Sequence[int], order: Sequence[int]) -> Tensor:
        """Return rows that belong to images of `counts` rows each with the images in another order."""
        if list(order) == sorted(order):
            return rows
        pieces = rows.split(list(counts))
        return torch.cat([pieces[place] for place in order])


def _rows(values: Sequence[int]) -> Grid | None:
    count, *flat = values
    if count > MOST_IMAGES:
        return None
    return tuple(zip(*(flat[first : 3 * count : 3] for first in range(3)), strict=True))


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda place: order[place])


class _Exchange(Function):
    """Rows to other ranks, and their gradients back. Every rank calls both."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
        ctx.sizes = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.sizes
        return _all_to_all(gradient, received, sent, group), None, None, None


def _all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> Tensor:
    arrived = rows.new_empty((sum(received), rows.shape[1]))
    distributed.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived
