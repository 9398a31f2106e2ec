"""Two mistakes of megatron-core in what it keeps of groups that it offloads, mended for every model.

A microbatch whose first group stays on the device counts as over after that group, and the next group goes to the
bookkeeping of the next microbatch: the backward ends with an assertion. And memory that a group gives back may be
shared by tensors that stay, of the group as too small to be copied, or of a group before it that stays, such as the
output that attention saves and its projection gives back: the backward reads memory that is gone.
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
        over = old(self, name)
        if not over or name is None or self.find_next_group(name) is None:
            return over
        return _backward_began(self)

    return finish_all_groups


def _backward_began(microbatch: Any) -> bool:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

    manager: Any = PipelineOffloadManager.get_instance()
    return microbatch in manager._cached_chunks_backward[: manager._cached_chunks_index_backward]


def _releasing(old: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that gives what stays memory of its own, before memory that it shares with a group is freed."""

    @functools.wraps(old)
    def bulk_offload(self: Any, *given: Any) -> Any:
        *name, released = given  # before megatron-core 0.19 the last group, without a name
        pending = [group for group in self._groups_to_offload if [group._name] == name or not name]
        group = pending[0 if name else -1] if pending else None  # upstream says that there is none
        if released and group is not None and self.should_bulk_offload(*[group] * len(name)):
            _part(self, group, released)
        return old(self, *given)

    return bulk_offload


def _part(microbatch: Any, leaving: Any, released: Sequence[Tensor]) -> None:
    """Copy each saved tensor that a group does not copy out of memory that it is about to give back."""
    leaves = microbatch.tensor_need_offloading_checker
    going = [tensor.untyped_storage() for tensor in released if leaves(tensor)]
    freed = {storage._cdata for storage in going}  # addresses of their own as long as `going` holds them
    for group in _of_its_layer(microbatch, leaving):
        for tag, tensor in group._tensors.items():
            gone = isinstance(tensor, tuple) or (group is leaving and leaves(tensor))
            if not gone and tensor.untyped_storage()._cdata in freed:
                own = tensor.detach().clone()
                group._tensors[tag] = own if leaves(tensor) else never_offload(own)


def _of_its_layer(microbatch: Any, group: Any) -> Sequence[Any]:
    """Return the groups that have begun since the last one of the same name, of the layer before."""
    begun: list[Any] = microbatch.offload_groups[: microbatch._offloaded_group_index]
    place = begun.index(group)
    earlier = (at for at in reversed(range(place)) if begun[at]._name == group._name)
    return begun[next(earlier, -1) + 1 :]


PATCHES = (
    Patch(seam("offloaded_microbatch_ends"), _finishing),
    Patch(seam("offloaded_memory"), _releasing),
)
