"""Loops free a model's buffers by `resize_(0)` and fill them again; graphs find them at the addresses they recorded.

A seam of PyTorch: it is patched with the first model on graphs whose memory may leave, and never before.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import UntypedStorage, nn

from ....graphs.memory.ranges import close_left
from ....graphs.memory.returning_storages import Resize, ReturningStorages
from ....upstream_types import MegatronParameter
from ...seams.activation import before_deactivation
from ...seams.patches import Patch
from ...seams.seam import Seam
from ..loops import emptied_cache

SEAM = Seam(
    name="resized_storages",
    module="torch",
    target="UntypedStorage.resize_",
    kind="function",
    touch="patched",
    purpose="parameters that left the device return to the addresses that graphs have recorded",
)
STORAGES = ReturningStorages()


def _returning(old: Resize) -> Resize:
    @functools.wraps(old)
    def resize_(storage: UntypedStorage, nbytes: int) -> UntypedStorage:
        return STORAGES.resize(storage, nbytes, old)

    return resize_


PATCH = Patch(SEAM, _returning)


def follow_storages(models: Iterable[nn.Module]) -> None:
    """Let memory of the models' parameters and gradients return to the same addresses once it was freed and filled."""
    STORAGES.follow(storage for model in models for storage in _storages_of(model))
    emptied_cache.after_empty_cache(STORAGES.forget_dead)
    PATCH.apply(torch)


def _storages_of(model: nn.Module) -> Iterator[UntypedStorage]:
    """Yield the storages of parameters and `main_grad`s on a GPU, of which data parallelism has a few."""
    for parameter in model.parameters():
        held: MegatronParameter = parameter
        tensors: tuple[Any, ...] = (parameter, getattr(held, "main_grad", None))
        yield from (t.untyped_storage() for t in tensors if t is not None and emptied_cache.is_on_device(t))


def _stop() -> None:
    PATCH.revert()
    STORAGES.stop(UntypedStorage.resize_)
    torch.cuda.empty_cache()
    close_left()


before_deactivation(_stop)
