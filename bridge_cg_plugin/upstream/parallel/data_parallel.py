"""What a replay must do for Megatron's data parallelism: wait for gathered parameters, report arrived gradients."""

from collections.abc import Callable, Sequence, Set
from functools import partial
from itertools import groupby
from typing import Any

from torch import nn

from ...upstream_types import UpstreamModule
from ..wrappers import unwrapped

START, FINISH = "start_grad_sync", "finish_grad_sync"

AddsLater = Callable[[Set[nn.Parameter]], bool]


class ReductionOrder:
    """Lets a module's bucket groups start their reductions in one order on all ranks.

    Data-parallel ranks share a communicator, so they must start reductions alike. One may replay a step's last
    microbatch while another runs it eager, and gradients then arrive in different orders. A group that is ready waits
    for the groups before it, and for replays that will yet add to its gradients. If a group before it gets none, for
    want of images, the waiting groups start when the first of them is finished.

    Args:
        groups: Bucket groups in the order that all ranks keep; replaced on the instances from `keep` to `remove`.
        parameters: Of each group.
        own: The module's; a group may have others' as well.
    """

    def __init__(
        self,
        groups: Sequence[Any],
        parameters: Sequence[Set[nn.Parameter]],
        own: Set[nn.Parameter] = frozenset(),
    ) -> None:
        self._groups, self._parameters, self._own = list(groups), list(parameters), own
        self._starts = [getattr(group, START) for group in groups]
        self._finishes = [getattr(group, FINISH) for group in groups]
        self._adds_later: AddsLater = lambda parameters: False
        self._waiting: dict[int, bool] = {}
        self._started: set[int] = set()
        self._finishing: int | None = None
        self._on = False
        self._put = [(partial(self._start, i), partial(self._finish, i)) for i in range(len(self._groups))]

    def keep(self, adds_later: AddsLater) -> None:
        """Begin to keep the order.

        Args:
            adds_later: Whether the backward under way will yet add to the gradient of one of these parameters, unseen
                by autograd.
        """
        self._adds_later, self._on = adds_later, True
        for group, (start, finish) in zip(self._groups, self._put, strict=True):
            setattr(group, START, start)
            setattr(group, FINISH, finish)

    def remove(self) -> None:
        """Let groups start when they are ready; what somebody put around this stays, without effect."""
        self._on = False
        for group, functions in zip(self._groups, self._put, strict=True):
            for name, function in zip((START, FINISH), functions, strict=True):
                if group.__dict__.get(name) is function:
                    del group.__dict__[name]

    def _start(self, number: int, force_all_reduce: bool = False) -> None:
        if not self._on or number == self._finishing:
            self._starts[number](force_all_reduce=force_all_reduce)
            return
        self._waiting[number] = force_all_reduce
        self.go_on()

    def go_on(self) -> None:
        """Start the groups that wait for nothing any more."""
        for each, parameters in enumerate(self._parameters):
            if each in self._waiting and not self._adds_later(parameters):
                self._launch(each)
            elif each not in self._started:
                return

    def _launch(self, number: int) -> None:
        self._started.add(number)
        self._starts[number](force_all_reduce=self._waiting.pop(number))

    def _finish(self, number: int, force_all_reduce: bool = False) -> None:
        if self._on and self._module_did_not_run():
            self._waiting = dict.fromkeys(range(len(self._groups)), force_all_reduce)
            for group in self._groups:
                if group.is_first_batch:
                    # Upstream would learn from this batch how many gradients the group waits for: leave it to another.
                    group.per_param_grad_ready_counts.clear()
        if number in self._waiting:
            for each in sorted(self._waiting):
                self._launch(each)
        before, self._finishing = self._finishing, number
        try:
            self._finishes[number](force_all_reduce=force_all_reduce)
        finally:
            self._finishing = before
        if number == len(self._groups) - 1:
            self._started.clear()

    def _module_did_not_run(self) -> bool:
        if self._started or self._waiting or not self._own:
            return False
        return not any(self._own & group.per_param_grad_ready_counts.keys() for group in self._groups)


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
