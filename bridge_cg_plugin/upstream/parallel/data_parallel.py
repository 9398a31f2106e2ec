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
        self._put = [
            (group, name, partial(method, number))
            for number, group in enumerate(self._groups)
            for name, method in ((START, self._start), (FINISH, self._finish))
        ]

    def keep(self, adds_later: AddsLater) -> None:
        """Begin to keep the order.

        Args:
            adds_later: Whether the backward under way will yet add to the gradient of one of these parameters, unseen
                by autograd.
        """
        self._adds_later, self._on = adds_later, True
        for group, name, function in self._put:
            setattr(group, name, function)

    def remove(self) -> None:
        """Let groups start when they are ready; what somebody put around this stays, without effect."""
        self._on = False
        for group, name, function in self._put:
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


class MegatronReduction:
    """What `DistributedDataParallel` does with a model; see `graphs.replays.gradients.Reduction`.

    Args:
        chunk: The data parallelism.
        groups: The bucket groups of the model's parameters, in their order.
        parameters: Those of the model's that it has.
    """

    def __init__(self, chunk: UpstreamModule, groups: Sequence[Any], parameters: Sequence[nn.Parameter]) -> None:
        self._chunk, self._groups, self._parameters = chunk, groups, parameters
        self._order: ReductionOrder | None = None

    def order(self) -> ReductionOrder | None:
        """Return the order of the model's reductions, to be kept; None where none starts inside a backward."""
        if not self._chunk.ddp_config.overlap_grad_reduce:
            return None
        parameters: dict[Any, set[nn.Parameter]] = {}
        for parameter, group in self._chunk.param_to_bucket_group.items():
            parameters.setdefault(group, set()).add(parameter)
        groups = [group for group in parameters if group in self._groups]
        self._order = ReductionOrder(groups, [parameters[group] for group in groups], frozenset(self._parameters))
        return self._order

    def gather(self) -> None:
        """Wait for the model's parameters under `overlap_param_gather`, before a replay.

        Eager forward does this in a hook on every module; here the hooks' work is done once for all of them, in the
        order of their parameters.
        """
        if not getattr(self._chunk, "remove_forward_pre_hook_handles", None):
            return
        skip = self._chunk.ddp_config.align_param_gather
        skip = skip or getattr(self._chunk, "overlap_param_gather_with_optimizer_step", False)
        for group in self._groups:
            group.finish_param_sync(skip_next_bucket_dispatch=skip)

    def waits(self) -> bool:
        """Whether a gradient that arrives now may set off communication: its hook does nothing else of use."""
        overlaps: bool = self._chunk.ddp_config.overlap_grad_reduce
        return overlaps and any(g.is_last_microbatch for g in self._groups)

    def arrived(self, parameters: Sequence[nn.Parameter]) -> None:
        """Do what the hooks of these parameters do once their gradients are in `main_grad`.

        All of a group but the last are registered by their count alone, as one call for each costs the host.
        """
        for group, ready in groupby(parameters, self._chunk.param_to_bucket_group.__getitem__):
            if group.is_last_microbatch:
                counts, (*others, last) = group.per_param_grad_ready_counts, ready
                for parameter in others:
                    counts[parameter] = counts.get(parameter, 0) + 1
                group.register_grad_ready(last, self._chunk.force_all_reduce)
        if self._order is not None:
            self._order.go_on()


def megatron_reduction(chunks: Sequence[nn.Module], model: nn.Module) -> MegatronReduction | None:
    """Return the reduction that a model's gradients go to; None where Megatron's data parallelism has none of them.

    Args:
        chunks: The training loop's model chunks.
        model: The model whose parameters are meant.
    """
    parameters = list(model.parameters())
    for chunk in data_parallel(chunks):
        group_of = chunk.param_to_bucket_group
        owned = [parameter for parameter in parameters if parameter in group_of]
        if owned:
            groups = {id(group_of[parameter]): group_of[parameter] for parameter in owned}
            return MegatronReduction(chunk, list(groups.values()), owned)
    return None


def data_parallel(chunks: Sequence[nn.Module]) -> list[UpstreamModule]:
    """Return the data parallelism of a model's chunks, which other wrappers may be around."""
    return [module for chunk in chunks for module in unwrapped(chunk) if vars(module).get("param_to_bucket_group")]
