"""One order of gradient reductions for replays and eager passes."""

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

from torch import nn

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
