"""megatron-core's activation offloading: what Qwen3-VL's language model leaves out of it, and two mistakes of its own.

Bridge's `forward` of that model stands in for megatron-core's and leaves out the call that notifies offloading of a new
microbatch; that of its attention leaves out the groups of what is offloaded. As released the options are accepted and
nothing of either is ever offloaded.

A microbatch whose first group stays on the device counts as over after that group, and the next group goes to the
bookkeeping of the next microbatch: the backward ends with an assertion. And memory that a group gives back may be
shared by tensors that stay, of the group as too small to be copied, or of a group before it that stays, such as the
output that attention saves and its projection gives back: the backward reads memory that is gone.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import CodeType
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from ...offload import never_offload
from ...upstream_types import UpstreamModule
from ..seams.patches import Patch
from ..seams.registry import seam
from ..wrappers import overridden

_BEGINS = seam("offload_begins").target.rpartition(".")[2]
_GROUPS = seam("offload_groups").target
# Attention of language models that notify offloading: encoders have the same class, and no microbatches of their own.
_notified: WeakSet[nn.Module] = WeakSet()
# Which tensors, of those that a step of attention is called with, give their memory back once they were copied.
Released = Callable[[Sequence[Any]], list[Tensor]]


def _telling(old: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `forward` that first notifies offloading of the microbatch."""

    @functools.wraps(old)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.fine_grained_activation_offloading:
            getattr(self, _BEGINS)()
            _notified.update(layer.self_attention for layer in self.decoder.layers)
        return old(self, *args, **kwargs)

    return forward


def _tells_nothing(old: Callable[..., Any]) -> bool:
    """Whether a `forward` leaves the call out."""
    return _BEGINS not in _names(old)


def _names(function: Callable[..., Any]) -> Sequence[str]:
    """Return the names that a function's code uses; none of another callable, which nobody can look into."""
    code = getattr(function, "__code__", None)
    return code.co_names if isinstance(code, CodeType) else (_BEGINS, _GROUPS)


def _grouping(old: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `forward` of attention whose steps are groups that are offloaded, as in megatron-core's own."""

    @functools.wraps(old)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self not in _notified:
            return old(self, *args, **kwargs)
        with ExitStack() as stack:
            for owner, name, step in _steps(self):
                stack.enter_context(overridden(owner, name, step))
            return old(self, *args, **kwargs)

    return forward


def _groups_nothing(old: Callable[..., Any]) -> bool:
    """Whether a `forward` of attention leaves the groups out."""
    return not {"off_interface", _GROUPS} & set(_names(old))


def _steps(attention: UpstreamModule) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield what is offloaded of attention: where its steps are called, and the step as a group."""
    if attention.offload_qkv_linear:
        name = "get_query_key_value_tensors"
        yield attention, name, _in_group(getattr(attention, name), "qkv_linear", lambda given: [])
    recomputed = attention.checkpoint_core_attention
    if attention.offload_core_attention and attention.training and not recomputed:
        core = attention.core_attention
        yield core, "forward", _in_group(core.forward, "core_attn", lambda given: list(given[:3]))
    if attention.offload_attn_proj:
        projection = attention.linear_proj
        yield projection, "forward", _in_group(projection.forward, "attn_proj", lambda given: list(given[:1]))


def _in_group(work: Callable[..., Any], name: str, released: Released) -> Callable[..., Any]:
    """Return a step of attention whose saved tensors are a group that is offloaded when the step ends."""
    import megatron.core.pipeline_parallel.fine_grained_activation_offload as offloading

    interface: Any = getattr(offloading, _GROUPS)

    def step(first: Tensor, *others: Any, **kwargs: Any) -> Any:
        group = interface(True, first, name)
        with group as first:
            made = work(first, *others, **kwargs)
        given = released((first, *others))
        if hasattr(interface, "group_offload"):
            return group.group_offload(made, forced_released_tensors=given)
        return interface.group_commit(made, name=name, forced_released_tensors=given)

    return step


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
    Patch(seam("language_model_offload"), _telling, needed=_tells_nothing),
    Patch(seam("attention_offload"), _grouping, needed=_groups_nothing),
    Patch(seam("offloaded_microbatch_ends"), _finishing),
    Patch(seam("offloaded_memory"), _releasing),
)
