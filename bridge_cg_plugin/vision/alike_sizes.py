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

from ..graphs.changes.source import autocast_dtype
from ..graphs.fallback import Fallback
from ..graphs.planning.buckets import Bucket
from ..graphs.program import RegionProgram
from ..graphs.recordings.capture import is_capturing
from ..upstream_types import UpstreamModule

# Sizes are looked at where they are asked for, in spans of so many tokens: a look multiplies by each of them.
SPAN = 256


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
        self._unit, self._span = unit, max(SPAN // unit, 1) * unit
        self._products = tuple({product.kind: product for product in products}.values())
        self._devices = {product.module.weight.device.type for product in self._products}
        self._firsts: dict[tuple[Hashable, int], list[int]] = {}
        self._lasts: dict[tuple[Hashable, int, int], int] = {}

    def last(self, tokens: int, capacity: int) -> int:
        """Return the largest size up to a capacity that rounds as this one, which is no larger.

        Inside a capture, nothing is tried: further sizes are not known to round alike.
        """
        types = tuple(map(autocast_dtype, self._devices))
        asked = types, tokens, capacity
        if asked not in self._lasts:
            found = self._last(*asked)
            if found is None:
                return tokens
            self._lasts[asked] = found
        return self._lasts[asked]

    def _last(self, types: Hashable, tokens: int, capacity: int) -> int | None:
        """Return what `last` does under an autocast; None where it is not known and cannot be tried now."""
        spans = range(tokens // self._span, -(-capacity // self._span)) if tokens < capacity else ()
        for span in spans:
            if (types, span) not in self._firsts:
                if is_capturing():
                    return None
                self._firsts[types, span] = self._changes_in(span)
            firsts = self._firsts[types, span]
            following = bisect_right(firsts, tokens)
            if following < len(firsts):
                return min(firsts[following] - self._unit, capacity)
        return capacity

    def _changes_in(self, span: int) -> list[int]:
        """Return where runs begin in a span, which reaches to the first size of the next one."""
        sizes = range(max(span * self._span, self._unit), (span + 1) * self._span + 1, self._unit)
        return sorted({size for product in self._products for size in _changes(product, sizes)})


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
