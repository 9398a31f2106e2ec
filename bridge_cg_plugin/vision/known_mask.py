"""Masks of which the host has a copy, so that indexing by them does not wait for the device."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..graphs.host_copies import on_device, version_of

_ATEN = torch.ops.aten
_WRITES = (_ATEN.index_put_.default, _ATEN.index_put.default, _ATEN._index_put_impl_.default)
_ALIASES = (_ATEN.detach.default, _ATEN.alias.default)


class KnownMask(Tensor):
    """A boolean tensor of a device, with a copy on the host.

    Reading or writing the elements that a mask marks needs their number, for which the host waits for the device. Here
    their places are computed on the host, in the order in which the device finds them, and index in place of the mask,
    also in the backward. Anything else computes with the plain mask and gives plain tensors.

    Args:
        plain: The mask.
        host: The same on the host. Nobody may write to it.

    Attributes:
        plain: The mask, without a host copy.
        host: The host copy.
    """

    # Indexing reaches `__torch_dispatch__`, below autograd.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    plain: Tensor
    host: Tensor
    _version_at_copy: int

    @staticmethod
    def __new__(cls, plain: Tensor, host: Tensor) -> "KnownMask":
        """See the class."""
        mask = Tensor._make_subclass(cls, plain)
        mask.plain, mask.host, mask._version_at_copy = plain, host, version_of(plain)
        return mask

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        """Name the mask without reading the device."""
        return f"KnownMask({self.host!r})"

    @cached_property
    def places(self) -> tuple[Tensor, ...]:
        """Where the mask is true: int64 indices on the device, a tensor for each of the mask's dimensions."""
        device = self.plain.device
        return tuple(on_device(torch.from_numpy(axis), device) for axis in self.host.numpy().nonzero())

    @property
    def current(self) -> bool:
        """Whether nobody wrote to the mask since the host copy was made."""
        return version_of(self.plain) == self._version_at_copy

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation with places for masks that index and with plain masks elsewhere."""
        if func in _WRITES:
            return _write(func, *args, **(kwargs or {}))
        if func is _ATEN.index.Tensor:
            args = (args[0], _by_places(*args))
        result = func(*_plain(args), **_plain(kwargs or {}))
        return cls(result, args[0].host) if func in _ALIASES and args[0].current else result


def _write(
    func: Any, tensor: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Tensor:
    """Write to elements. Places are inside the tensor, and looking whether they are would wait for the device."""
    target = tensor.clone() if func is _ATEN.index_put.default else tensor
    found = _by_places(target, indices)
    inside = all(isinstance(index, KnownMask) and index.current for index in indices if index is not None)
    _ATEN._index_put_impl_(*_plain((target, found, values)), accumulate, unsafe or inside)
    return target


def _by_places(tensor: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return a tensor's indices with places for masks; a mask of another shape stays, so that it raises as upstream."""
    found: list[Tensor | None] = []
    dimension = 0
    for index in indices:
        width = index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
        fits = isinstance(index, KnownMask) and index.current
        if fits and tensor.shape[dimension : dimension + width] == index.shape:  # type: ignore[union-attr]
            found += index.places  # type: ignore[union-attr]
        else:
            found.append(index)
        dimension += width
    return found


def _plain(arguments: Any) -> Any:
    return tree_map_only(KnownMask, lambda mask: mask.plain, arguments)
