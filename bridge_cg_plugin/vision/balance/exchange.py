"""Images of a microbatch to the data-parallel ranks that encode them, and their embeddings back."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..adapter import MovableImages
from ..batch import VisionBatch
from ..eager_costs import Clock, CudaClock
from ..host_grids import Grid
from .assignment import Plan, plan_moves
from .exchange_costs import PAYS, EncodingTimes, ExchangeCost, HostClock, measured_cost

# Most images and videos of a rank's microbatch that are told to the others; with more none move in that microbatch.
MOST_IMAGES = 128
NONE: Grid = ()

# An encoder: its outputs, `[patches / patches of an embedding, columns]` each.
Encode = Callable[[VisionBatch], tuple[Tensor, ...]]


class ImageExchange:
    """Levels the encoders' work of the ranks that hold the same weights.

    All of them call `encode` or `without_images` once for every microbatch, in the same order; none can go on before
    all did. What they say to each other then is the sizes of their images, in host memory. Only if a plan moves images
    do pixels travel, and embeddings back; gradients of embeddings go the way of the pixels.

    Args:
        sizes: The ranks, over a backend that takes host tensors.
        rows: The same ranks in the same order, over a backend that takes the encoder's; used for nothing else, so that
            what ranks without an image leave out elsewhere cannot disturb the order.
        share: Part of the largest rank's patches that moving must save; "auto" moves images where what that saves, by
            measured times, is more than what it takes.
        images: What images and embeddings are.
        trains: Whether the encoder trains anything, the same on all ranks.
        clock: Measures for "auto"; None takes device events, the host's clock without a GPU.

    Attributes:
        moved: Images that other ranks encoded.
        microbatches: In which any image of any rank moved.
        unpaid: Microbatches in which moves would have levelled the ranks, and taken longer than they save.
    """

    def __init__(
        self,
        sizes: distributed.ProcessGroup,
        rows: distributed.ProcessGroup,
        share: float | Literal["auto"],
        images: MovableImages,
        trains: Callable[[], bool],
        clock: Clock | None = None,
    ) -> None:
        self._sizes, self._rows = sizes, rows
        self._share = 0.0 if isinstance(share, str) else share
        self._images, self._trains = images, trains
        self._rank, self._world = distributed.get_rank(rows), distributed.get_world_size(rows)
        self._clock = clock or (CudaClock() if images.weight.is_cuda else HostClock())
        self._times = EncodingTimes(self._clock) if share == "auto" else None
        self._cost: ExchangeCost | None = None
        self._ns_per_patch = 0
        self.moved = self.microbatches = self.unpaid = 0

    def encode(self, batch: VisionBatch, encode: Encode) -> tuple[Tensor, ...]:
        """Return the outputs of this rank's images, wherever they were encoded."""
        plan = self._plan(batch.rows)
        encode = self._timed(encode)
        if plan is None:
            return encode(batch)
        return self._encode_as_planned(plan, batch, encode)

    def without_images(self, encode: Encode) -> Tensor | None:
        """Take part in a microbatch in which this rank has no image.

        Returns:
            What the microbatch's loss must depend on, a zero, so that gradients of other ranks' images come by; None
            where no image moved.
        """
        plan = self._plan(NONE)
        if plan is None:
            return None
        first, *others = self._encode_as_planned(plan, None, self._timed(encode))
        return sum((output.sum() for output in others), first.sum())

    def forget_times(self) -> None:
        """Discard measurements: from now on encoding is done in another way."""
        if self._times is not None:
            self._times.forget()

    def note(self) -> str:
        """Return what was done, and by what measured times, in words."""
        done = f"{self.moved} images of all ranks were moved, in {self.microbatches} microbatches"
        if self._times is None or self._cost is None:
            return done
        took = f"1000 patches take {self._ns_per_patch / 1e3:.2f} ms, an exchange {self._cost.ms:.2f} ms and more"
        return f"{done}; in {self.unpaid} it would not have paid ({took})"

    def _timed(self, encode: Encode) -> Encode:
        return encode if self._times is None else partial(self._times.encode, encode=encode)

    def _plan(self, rows: Grid) -> Plan | None:
        """Return where this microbatch's images are encoded, the same on all ranks; None where none moves."""
        grids = self._gathered(rows)
        if self._times is None:
            return plan_moves(grids, self._share)
        if self._cost is None:
            self._cost = self._agreed_cost()
        plan = plan_moves(grids, 0.0)
        if plan is None or self._pays(plan, self._cost):
            return plan
        self.unpaid += 1
        return None

    def _pays(self, plan: Plan, cost: ExchangeCost) -> bool:
        return plan.saved * self._ns_per_patch / 1e6 > PAYS * cost.of(plan.most, self._images.bytes_per_patch)

    def _agreed_cost(self) -> ExchangeCost:
        """Return what an exchange takes on the rank where it takes longest."""
        weight = self._images.weight

        def exchange(rows: int) -> int:
            given = weight.new_zeros((rows * self._world, self._images.patch_width))
            _all_to_all(given, [rows] * self._world, [rows] * self._world, self._rows)
            return given.numel() * given.element_size()

        def synchronize() -> None:
            if weight.is_cuda:
                torch.cuda.synchronize(weight.device)

        own = measured_cost(self._clock, exchange, synchronize)
        longest = torch.tensor([own.ms, own.ms_per_byte], dtype=torch.float64)
        distributed.all_reduce(longest, distributed.ReduceOp.MAX, group=self._sizes)
        return ExchangeCost(*longest.tolist())

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
        """Return every rank's images; nobody's where one has too many. They tell their time by the patch as well."""
        told = torch.zeros(2 + 3 * MOST_IMAGES, dtype=torch.int64)
        told[-1] = self._times.ns_per_patch() if self._times is not None else 0
        told[0] = len(rows)
        if 0 < len(rows) <= MOST_IMAGES:
            told[1 : 1 + 3 * len(rows)] = torch.tensor(rows).flatten()
        heard = torch.empty(self._world * len(told), dtype=torch.int64)
        distributed.all_gather_into_tensor(heard, told, group=self._sizes)
        images, known = heard.view(self._world, -1).split([1 + 3 * MOST_IMAGES, 1], dim=1)
        self._ns_per_patch = min((ns for ns in known.flatten().tolist() if ns), default=0)
        found = [grid for values in images.tolist() if (grid := _rows(values)) is not None]
        return found if len(found) == self._world else [NONE] * self._world

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
