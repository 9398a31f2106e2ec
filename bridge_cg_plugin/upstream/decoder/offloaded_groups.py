"""Two mistakes of megatron-core in what it keeps of groups that it offloads, mended for every model.

A microbatch whose first group stays on the device counts as over after that group, and the next group goes to the
bookkeeping of the next microbatch: the backward ends with an assertion. And memory that a group gives back may be
shared by tensors of the group that stay, too small to be copied: the backward reads memory that is gone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ...offload import never_offload
from ..seams.patches import Patch
from ..seams.registry import seam


def _finishing(old: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that knows a microbatch to be over by its groups, as long as its backward has not begun."""

    @functools.wraps(old)
    def finish_all_groups(self: Any, name: str | None = None) -> Any:
        if name is None or _backward_began(self):
            return old(self, name)
        return self.find_next_group(name) is None

    return finish_all_groups


def _backward_began(microbatch: Any) -> bool:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    manager: Any = PipelineOffloadManager.get_instance()
    begun = manager._cached_chunks_backward[: manager._cached_chunks_index_backward]
    return any(one is microbatch for one in begun)


def _releasing(old: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that gives what stays of a group memory of its own, before memory that it shares is freed."""

    @functools.wraps(old)
    def bulk_offload(self: Any, *given: Any) -> Any:
        *name, released = given  # before megatron-core 0.19 the last group, without a name
        pending = [group for group in self._groups_to_offload if [group._name] == name or not name]
        group = pending[0] if name else pending[-1]
        if released and self.should_bulk_offload(*[group] * len(name)):
            _part(self, group._tensors, released)
        return old(self, *given)

    return bulk_offload


def _part(microbatch: Any, saved: dict[Any, Any], released: Sequence[Tensor]) -> None:
    """Copy each saved tensor that stays on the device out of memory that is about to be given back."""
    leaves = microbatch.tensor_need_offloading_checker
    freed = {_memory(tensor) for tensor in released if leaves(tensor)}
    for tag, tensor in saved.items():
        if not leaves(tensor) and _memory(tensor) in freed:
            saved[tag] = never_offload(tensor.detach().clone())


def _memory(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


PATCHES = (
    Patch(seam("offloaded_microbatch_ends"), _finishing),
    Patch(seam("offloaded_memory"), _releasing),
)
