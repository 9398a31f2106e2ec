"""Sizes at which eager adds up matrix products in the same order, so that a bucket of one may hold the others.

Matrix libraries choose a kernel by the number of rows. With sides that are no multiple of eight elements, as in
Qwen2.5-VL's MLP, and in convolutions, these kernels add up in different orders.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from wrapt import ObjectProxy

from ..graphs.changes.source import autocast_dtype
from ..graphs.fallback import Fallback
from ..graphs.planning.buckets import Bucket
from ..graphs.program import RegionProgram
from ..graphs.recordings.capture import is_capturing
from ..upstream_types import UpstreamModule

# Orders whose sizes are nearest are those that a size is compared with; one that is as another's counts as new.
NEAREST = 4


@dataclass(frozen=True, slots=True)
class RowProduct:
    """A product of rows with a weight: what the order of additions depends on besides the number of rows.

    It keeps no module: one may be replaced, and a loop may take its weights to another device.

    Attributes:
        weight: Shape of the weight; images are in channels-last format.
        strides: Of the weight.
        bias: Shape of the bias, if there is one.
        dtype: Of all.
        device: Of all.
        step: Stride of a convolution, whose kernel covers a row; None of a linear layer.
        tokens: Tokens of one row.
    """

    weight: torch.Size
    strides: tuple[int, ...]
    bias: torch.Size | None
    dtype: torch.dtype
    device: torch.device
    step: tuple[int, ...] | None
    tokens: int

    @classmethod
    def of(cls, module: UpstreamModule, tokens: int) -> Self:
        """Return the product of a linear layer, or of a convolution; `tokens` as in the attributes."""
        weight, bias = module.weight, module.bias
        shape, step = None if bias is None else bias.shape, getattr(module, "stride", None)
        return cls(weight.shape, weight.stride(), shape, weight.dtype, weight.device, step, tokens)

    def operands(self, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return so many rows, a weight and a bias, drawn alike at every call; random states stay as they are.

        The module's own would show no order where they are zero, as adapters are at first, or NaN.
        """
        generator = torch.Generator(self.device).manual_seed(0)
        like: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "generator": generator}
        rows = torch.randn(count, *self.weight[1:], **like)
        weight = torch.empty_strided(self.weight, self.strides, dtype=self.dtype, device=self.device)
        weight.copy_(torch.randn(self.weight, **like))
        rows = rows.to(memory_format=torch.channels_last) if rows.dim() == 4 else rows
        return rows, weight, None if self.bias is None else torch.randn(self.bias, **like)

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the products of rows, as the module computes them."""
        if self.step is None:
            return functional.linear(rows, weight, bias)
        convolve = functional.conv2d if weight.dim() == 4 else functional.conv3d
        found: Tensor = convolve(rows, weight, bias, self.step)
        return found.flatten(1)


class _Order:
    """Sizes at which products are added up in one order: rows of each are the first rows of the next larger one."""

    def __init__(self) -> None:
        self._sizes: list[int] = []

    def next_to(self, size: int) -> int:
        """Return the smallest of these that is no less than a size, the largest where none is."""
        return self._sizes[min(bisect_left(self._sizes, size), len(self._sizes) - 1)]

    def add(self, size: int) -> None:
        """Note a size whose rows are as those of the one next to it."""
        insort(self._sizes, size)


class AlikeSizes:
    """Sizes that round alike, found by trying every size that is asked about once.

    Args:
        products: Those of an encoder; equal ones are tried once.
        unit: Sizes are multiples of it.
        autocasts: What autocast has cast to in microbatches, None without it; others are added. Without any, that at a
            question counts.
    """

    def __init__(
        self, products: Iterable[RowProduct], unit: int, autocasts: set[torch.dtype | None] | None = None
    ) -> None:
        self._unit = unit
        self._products = dict.fromkeys(products)
        self._device = next((product.device.type for product in self._products), "cpu")
        self._autocasts = set() if autocasts is None else autocasts
        self._forget()

    def _forget(self) -> None:
        self._types = {product.dtype for product in self._products}
        self._orders: dict[Hashable, list[_Order]] = {}
        self._order_of: dict[tuple[Hashable, int], _Order] = {}
        # The least tokens that memory was not enough for: running out of it again would take long.
        self._too_many = math.inf

    def add(self, products: Iterable[RowProduct]) -> None:
        """Try these products, too: the encoder has changed. With new ones, all sizes are tried again."""
        known = len(self._products)
        self._products |= dict.fromkeys(products)
        if len(self._products) > known:
            self._forget()

    def alike_now(self, tokens: int, capacity: int) -> bool:
        """Whether a microbatch, which is under way, rounds as one that is no smaller.

        Inside a capture, nothing is tried: further sizes are not known to round alike.
        """
        autocast = autocast_dtype(self._device)
        self._autocasts.add(autocast)
        return self._alike(autocast, tokens, capacity)

    def alike(self, tokens: int, capacity: int) -> bool:
        """Whether microbatches of a size round as those of one that is no smaller."""
        autocasts = self._autocasts or {autocast_dtype(self._device)}
        return all(self._alike(autocast, tokens, capacity) for autocast in autocasts)

    def last(self, tokens: int, capacity: int) -> int:
        """Return a size up to a capacity that rounds as this one, which is no larger: the capacity, or one before.

        The next size rounds otherwise. It is the largest where orders change once, else perhaps a smaller one.
        """
        if self.alike(tokens, capacity):
            return capacity
        found, other = tokens // self._unit, -(-capacity // self._unit)
        while other - found > 1:
            between = _roundest(found, other)
            if self.alike(tokens, between * self._unit):
                found = between
            else:
                other = between
        return max(found * self._unit, tokens)

    def _alike(self, autocast: torch.dtype | None, tokens: int, capacity: int) -> bool:
        if tokens == capacity:
            return True
        if self._types <= {autocast, torch.float64}:  # nothing is cast
            autocast = None
        order = self._order(autocast, capacity)
        return order is not None and self._order(autocast, tokens) is order

    def _order(self, autocast: torch.dtype | None, size: int) -> _Order | None:
        """Return the order at a size; None where it is not known and cannot be tried now."""
        asked = autocast, size
        if asked not in self._order_of:
            if is_capturing():
                return None
            orders = self._orders.setdefault(autocast, [])
            near = nsmallest(NEAREST, orders, key=lambda order: abs(order.next_to(size) - size))
            order = next((each for each in near if self._same(autocast, size, each.next_to(size))), None)
            if order is None:
                orders.append(order := _Order())
            order.add(size)
            self._order_of[asked] = order
        return self._order_of[asked]

    def _same(self, autocast: torch.dtype | None, one: int, other: int) -> bool:
        size, larger = sorted((one, other))
        if larger >= self._too_many:
            return False
        try:
            with torch.autocast(self._device, autocast, enabled=autocast is not None):
                return all(_rounds_alike(product, size, larger) for product in self._products)
        except torch.OutOfMemoryError:
            self._too_many = larger
            return False


def _roundest(low: int, high: int) -> int:
    """Return the number between two others that is a multiple of the largest power of two."""
    dropped = (low ^ (high - 1)).bit_length() - 1
    return (high - 1) >> dropped << dropped


@torch.no_grad()
def _rounds_alike(product: RowProduct, size: int, larger: int) -> bool:
    """Whether the rows of a size are the first ones of a larger size."""
    rows, weight, bias = product.operands(larger // product.tokens)
    few = product(rows[: size // product.tokens], weight, bias)
    return torch.equal(few, product(rows, weight, bias)[: len(few)])


class RoundedAsEager(ObjectProxy):  # type: ignore[type-arg]  # older releases take none
    """An encoder's program that refuses sizes which a bucket would round otherwise than eager does.

    Args:
        program: The program.
        alike: Whether a size rounds as one that is no smaller.
        look: Called when the encoder may have changed.
    """

    def __init__(self, program: RegionProgram, alike: Callable[[int, int], bool], look: Callable[[], None]) -> None:
        super().__init__(program)
        self._self_alike, self._self_look = alike, look

    def modules(self) -> Sequence[nn.Module]:
        """See `RegionProgram`; asked after every change of a module."""
        self._self_look()
        modules: Sequence[nn.Module] = self.__wrapped__.modules()
        return modules

    def refuse(self, batch: Any, bucket: Bucket) -> Fallback | None:
        """See `RegionProgram`."""
        refusal: Fallback | None = self.__wrapped__.refuse(batch, bucket)
        if refusal is None and not self._self_alike(batch.tokens, bucket.tokens):
            return Fallback.OTHER_ROUNDING
        return refusal
