"""Sizes at which eager adds up matrix products in the same order, so that a bucket of one may hold the others.

Matrix libraries choose a kernel by the number of rows. With sides that are no multiple of eight elements, as in
Qwen2.5-VL's MLP, and in convolutions, these kernels add up in different orders.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from wrapt import ObjectProxy

from ..graphs.fallback import Fallback
from ..graphs.planning.buckets import Bucket
from ..graphs.program import RegionProgram
from ..upstream_types import UpstreamModule

# Sizes are looked at up to this one, or a power of two times it, at a time.
LOOKED_AT = 1024


@dataclass(frozen=True, slots=True)
class RowProduct:
    """A product of rows with a weight.

    Attributes:
        module: A linear layer, or a convolution whose kernel covers a row; images are in channels-last format.
        tokens: Tokens of one row.
    """

    module: UpstreamModule
    tokens: int

    @property
    def kind(self) -> Hashable:
        """What the order of additions depends on besides the number of rows."""
        weight, bias = self.module.weight, self.module.bias
        return weight.shape, weight.stride(), weight.dtype, bias is None, self.tokens

    def operands(self, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return so many rows, a weight and a bias, drawn alike at every call; random states stay as they are.

        The module's own would show no order where they are zero, as adapters are at first, or NaN, and may be away.
        """
        weight, bias = self.module.weight, self.module.bias
        generator = torch.Generator(weight.device).manual_seed(0)
        like = {"dtype": weight.dtype, "device": weight.device, "generator": generator}
        rows = torch.randn(count, *weight.shape[1:], **like)
        drawn = torch.empty_like(weight).copy_(torch.randn(weight.shape, **like))
        rows = rows.to(memory_format=torch.channels_last) if rows.dim() == 4 else rows
        return rows, drawn, None if bias is None else torch.randn(bias.shape, **like)

    def __call__(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the products of rows, as the module computes them."""
        if weight.dim() == 2:
            return functional.linear(rows, weight, bias)
        convolve = functional.conv2d if weight.dim() == 4 else functional.conv3d
        found: Tensor = convolve(rows, weight, bias, self.module.stride)
        return found.flatten(1)


class AlikeSizes:
    """Runs of sizes that round alike, found by trying.

    Args:
        products: Those of an encoder; one of each kind is tried.
        unit: Sizes are multiples of it.
    """

    def __init__(self, products: Iterable[RowProduct], unit: int) -> None:
        self._unit, self._looked_at = unit, 0
        self._firsts: list[int] = []
        self._products = tuple({product.kind: product for product in products}.values())

    def last(self, tokens: int, capacity: int) -> int:
        """Return the largest size up to a capacity that rounds as this one, which is no larger."""
        self._look(capacity)
        following = bisect_right(self._firsts, tokens)
        if following == len(self._firsts):
            return capacity
        return min(self._firsts[following] - self._unit, capacity)

    def _look(self, capacity: int) -> None:
        """Find where runs begin, up to a size at least."""
        while self._looked_at < capacity:
            most = max(2 * self._looked_at, LOOKED_AT // self._unit * self._unit, self._unit)
            sizes = range(max(self._looked_at, self._unit), most + 1, self._unit)
            found = {size for product in self._products for size in _changes(product, sizes)}
            self._firsts += sorted(found)
            self._looked_at = most


@torch.no_grad()
def _changes(product: RowProduct, sizes: Sequence[int]) -> Iterator[int]:
    """Yield the sizes whose rows round otherwise than those of the size before."""
    rows, weight, bias = product.operands(sizes[-1] // product.tokens)
    changed, before = [], product(rows[: sizes[0] // product.tokens], weight, bias)
    for size in sizes[1:]:
        found = product(rows[: size // product.tokens], weight, bias)
        changed.append((found[: len(before)] != before).any())
        before = found
    if changed:
        yield from (size for size, other in zip(sizes[1:], torch.stack(changed).tolist(), strict=True) if other)


class RoundedAsEager(ObjectProxy):  # type: ignore[type-arg]  # older releases take none
    """An encoder's program that refuses sizes which a bucket would round otherwise than eager does.

    Args:
        program: The program.
        sizes: Which sizes round alike.
    """

    def __init__(self, program: RegionProgram, sizes: AlikeSizes) -> None:
        super().__init__(program)
        self._self_sizes = sizes

    def refuse(self, batch: Any, bucket: Bucket) -> Fallback | None:
        """See `RegionProgram`."""
        refusal: Fallback | None = self.__wrapped__.refuse(batch, bucket)
        if refusal is None and self._self_sizes.last(batch.tokens, bucket.tokens) < bucket.tokens:
            return Fallback.OTHER_ROUNDING
        return refusal
