"""What a replay must do for Megatron's data parallelism: wait for gathered parameters, report arrived gradients."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from torch import nn

from ...upstream_types import UpstreamModule
from ..wrappers import unwrapped
from .reduction_order import ReductionOrder


def parameter_gather(chunks: Sequence[nn.Module], model: nn.Module) -> Callable[[], None] | None:
    """Return what a replay must call first under `overlap_param_gather`: wait for a model's parameters.

    Eager forward does this in a hook on every module; here the hooks' work is done once for all of them, in the order
    of their parameters.
    """
    found = bucket_groups(chunks, model)
    if found is None:
        return None
    chunk, groups = found

    def gather() -> None:
        if not getattr(chunk, "remove_forward_pre_hook_handles", None):
            return
        ddp = chunk.ddp_config
        skip = ddp.align_param_gather or getattr(chunk, "overlap_param_gather_with_optimizer_step", False)
        for group in groups:
            group.finish_param_sync(skip_next_bucket_dispatch=skip)

    return gather


def gradient_reduction(
    chunks: Sequence[nn.Module], model: nn.Module, order: ReductionOrder | None
) -> "MegatronReduction | None":
    """Return the reduction that a model's gradients go to; None where Megatron's data parallelism has none of them.

    Args:
        chunks: The training loop's model chunks.
        model: The model whose parameters are meant.
        order: Of its reductions, where one is kept.
    """
    found = bucket_groups(chunks, model)
    return MegatronReduction(*found, order) if found is not None else None


class MegatronReduction:
    """The gradient reduction of `DistributedDataParallel`; see `graphs.replays.gradients.Reduction`."""

    def __init__(self, chunk: UpstreamModule, groups: Sequence[Any], order: ReductionOrder | None) -> None:
        self._chunk, self._groups, self._order = chunk, groups, order

    def waits(self) -> bool:
        """Whether a gradient that arrives now may set off communication: its hook does nothing else of use."""
        overlaps: bool = self._chunk.ddp_config.overlap_grad_reduce
        return overlaps and any(g.is_last_microbatch for g in self._groups)

    def arrived(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do what the hooks of these parameters do once their gradients are in `main_grad`."""
        for group, ready in groupby(parameters, self._chunk.param_to_bucket_group.__getitem__):
            if group.is_last_microbatch:
                self._register(group, list(ready))
        if self._order is not None:
            self._order.go_on()

    def _register(self, group: Any, ready: Sequence[nn.Parameter]) -> None:
        """Register a group's parameters; all but the last by their count alone, as one call for each costs the host."""
        counts = group.per_param_grad_ready_counts
        *others, last = ready
        for parameter in others:
            counts[parameter] = counts.get(parameter, 0) + 1
        group.register_grad_ready(last, self._chunk.force_all_reduce)


def reduction_order(chunks: Sequence[nn.Module], model: nn.Module) -> ReductionOrder | None:
    """Return the order of a model's reductions, to be kept; None where none starts inside a backward.

    Args:
        chunks: The training loop's model chunks.
        model: The model whose parameters are meant.
    """
    found = bucket_groups(chunks, model)
    if found is None or not found[0].ddp_config.overlap_grad_reduce:
        return None
    chunk, groups = found
    parameters: dict[int, set[nn.Parameter]] = {}
    for parameter, group in chunk.param_to_bucket_group.items():
        parameters.setdefault(id(group), set()).add(parameter)
    of_the_model = set(map(id, groups))
    kept = [g for g in dict.fromkeys(chunk.param_to_bucket_group.values()) if id(g) in of_the_model]
    own = frozenset(parameter for parameter in model.parameters() if parameter in chunk.param_to_bucket_group)
    return ReductionOrder(kept, [parameters[id(group)] for group in kept], own)


def data_parallel(chunks: Sequence[nn.Module]) -> list[UpstreamModule]:
    """Return the data parallelism of a model's chunks, which other wrappers may be around."""
    return [module for chunk in chunks for module in unwrapped(chunk) if vars(module).get("param_to_bucket_group")]


def bucket_groups(chunks: Sequence[nn.Module], model: nn.Module) -> tuple[UpstreamModule, list[Any]] | None:
    """Return the chunk whose data parallelism has the model's parameters, and their bucket groups in order."""
    parameters = list(model.parameters())
    for chunk in data_parallel(chunks):
        groups_of = chunk.param_to_bucket_group
        owned = [p for p in parameters if p in groups_of]
        if owned:
            return chunk, list({id(groups_of[p]): groups_of[p] for p in owned}.values())
    return None
