"""Models that a loop takes off the device: memory of their graphs leaves with them, weights return to its addresses.

Both seams are PyTorch's. They are patched with the first model on graphs whose memory may leave, and never before.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage, nn

from ...graphs.memory.ranges import close_left
from ...graphs.memory.returning import Resize, ReturningStorages, release_homes
from ...upstream_types import MegatronParameter
from ..seams.activation import before_deactivation
from ..seams.patches import Patch
from ..seams.seam import patched, seams_of

EMPTIED_CACHE, RESIZED_STORAGES = seams_of(
    (),
    emptied_cache=patched("torch.cuda:empty_cache", "memory of graphs leaves the device with the model"),
    resized_storages=patched(
        "torch:UntypedStorage.resize_",
        "parameters that left the device return to the addresses that graphs have recorded",
    ),
)
STORAGES = ReturningStorages()
_listeners: list[Callable[[], object]] = []
_undisturbed = False


def is_on_device(tensor: Tensor) -> bool:
    """Whether a tensor is on a GPU, with or without memory."""
    return tensor.is_cuda


def has_left(model: nn.Module) -> bool:
    """Whether every parameter of a model is off the device, or has lost its memory."""
    # The first one that is there ends the search: a model that stayed costs no time.
    first = next(model.parameters(), None)
    return first is not None and all(
        not is_on_device(parameter) or parameter.untyped_storage().nbytes() == 0 for parameter in model.parameters()
    )


def follow(models: Iterable[nn.Module], listener: Callable[[], object]) -> None:
    """Let memory of the models' weights and gradients return to the same addresses once it was freed and filled.

    Args:
        models: The models.
        listener: Called after every `torch.cuda.empty_cache`, which loops call once a model has left.
    """
    STORAGES.follow(storage for model in models for storage in _storages_of(model))
    if listener not in _listeners:
        _listeners.append(listener)
    for module, patch in PATCHES:
        patch.apply(module)


def _storages_of(model: nn.Module) -> Iterator[UntypedStorage]:
    """Yield the storages of parameters and `main_grad`s on a GPU, of which data parallelism has a few."""
    for parameter in model.parameters():
        held: MegatronParameter = parameter
        tensors: tuple[Any, ...] = (parameter, getattr(held, "main_grad", None))
        yield from (t.untyped_storage() for t in tensors if t is not None and is_on_device(t))


@contextmanager
def undisturbed() -> Iterator[bool]:
    """Call no listeners inside, where memory leaves and the cache is emptied for it; yields whether any would be."""
    global _undisturbed
    before, _undisturbed = _undisturbed, True
    try:
        yield not before
    finally:
        _undisturbed = before


def _telling(old: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(old)
    def empty_cache() -> Any:
        found = old()
        with undisturbed() as first:
            if first:
                close_left()
                release_homes()
                for listener in _listeners:
                    listener()
        return found

    return empty_cache


def _returning(old: Resize) -> Resize:
    @functools.wraps(old)
    def resize_(storage: UntypedStorage, nbytes: int) -> UntypedStorage:
        return STORAGES.resize(storage, nbytes, old)

    return resize_


PATCHES = ((torch.cuda, Patch(EMPTIED_CACHE, _telling)), (torch, Patch(RESIZED_STORAGES, _returning)))


def stop() -> None:
    """Follow nothing any more."""
    for _, patch in PATCHES:
        patch.revert()
    _listeners.clear()
    STORAGES.stop()
    torch.cuda.empty_cache()
    release_homes()
    close_left()


before_deactivation(stop)


class ReturningBuffers:
    """Buffers as models have them now: `model.to(...)`, unlike for parameters, gives modules other tensors instead.

    Recordings are of the tensors that they were made from: a buffer that is another tensor is another model.

    Args:
        models: The model's chunks.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        modules = {module for model in models for module in model.modules()}
        self._of = WeakKeyDictionary({module: dict(module._buffers) for module in modules if module._buffers})

    def put_back(self) -> None:
        """Put tensors back that others just like them have replaced."""
        for module, held in self._of.items():
            for name, found in module._buffers.items():
                buffer = held.get(name)
                if found is not None and buffer is not None and found is not buffer and _are_alike(buffer, found):
                    module._buffers[name] = buffer


def _are_alike(one: Tensor, other: Tensor) -> bool:
    plain = type(one) is type(other) is Tensor and not (one.requires_grad or other.requires_grad or one.is_meta)
    layouts = ((each.device, each.dtype, each.shape, each.stride()) for each in (one, other))
    return plain and len(set(layouts)) == 1 and torch.equal(one, other)
