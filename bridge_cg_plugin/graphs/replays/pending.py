"""Replayed backwards to come, of whose parameters autograd does not know."""

from collections.abc import Sequence, Set
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from ..errors import ReplayError

# What PyTorch calls the backward under way where there is none.
NO_BACKWARD = -1
# Whether the backward under way runs a node of the autograd graph.
WILL_RUN = torch._C._will_engine_execute_node
# Place of a backward's inputs in PyTorch's call of its engine, behind the roots.
INPUTS = 3


class PendingReplays:
    """Replayed backwards that are to come, of all recordings of a region, and those of the backward under way.

    The reduction is notified once per backward, when the last replay has added its part.
    """

    def __init__(self) -> None:
        self._accumulated: WeakKeyDictionary[Node, frozenset[nn.Parameter]] = WeakKeyDictionary()
        self._done: list[tuple[nn.Parameter, ...]] = []
        self._backward = NO_BACKWARD
        self._guarded = False

    def expect(self, node: Node, accumulated: frozenset[nn.Parameter]) -> None:
        """Note that a replay's backward is to come, and the parameters to whose `main_grad` it adds."""
        self._accumulated[node] = accumulated
        if not self._guarded:
            self._guarded = True
            INPUTS_GUARD.add(self)

    def release(self) -> None:
        """Forget what is to come."""
        self._guarded = False
        INPUTS_GUARD.discard(self)

    def ran(self, node: Node, accumulated: tuple[nn.Parameter, ...], partly: bool) -> None:
        """Note that the backward under way has replayed it; `partly` added nothing."""
        if partly:
            self._accumulated.pop(node, None)
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # the one before may have failed
            self._backward, self._done = backward, []
        self._accumulated.pop(node, None)
        if not self._done or self._done[-1] is not accumulated:
            self._done.append(accumulated)

    def done(self) -> tuple[nn.Parameter, ...]:
        """Return the parameters to which the backward under way has added by replays; nothing while one is to come."""
        to_come = self._accumulated.data  # type: ignore[attr-defined] # its own dict: no call of Python's
        if to_come and self.to_come():
            return ()
        done, self._done = self._done, []
        return tuple(dict.fromkeys(chain(*done))) if done[1:] else done[0]

    def to_come(self) -> bool:
        """Whether the backward under way will yet replay one of which autograd does not know the parameters."""
        return torch._C._current_graph_task_id() != NO_BACKWARD and any(map(WILL_RUN, self._accumulated))

    def adds_later(self, parameters: Set[nn.Parameter]) -> bool:
        """Whether the backward under way will yet replay what adds to the gradient of one of these parameters."""
        if torch._C._current_graph_task_id() == NO_BACKWARD:
            return False
        return any(WILL_RUN(node) and not added.isdisjoint(parameters) for node, added in self._accumulated.items())

    def refuse(self, roots: Sequence[Tensor | GradientEdge], inputs: Set[Any]) -> None:
        """Raise where gradients of inputs are asked for that a replay behind some roots would add to `main_grad`.

        Raises:
            ReplayError: An input is such a parameter.
        """
        asked = [node for node, added in self._accumulated.items() if not added.isdisjoint(inputs)]
        if asked and not _behind(roots).isdisjoint(asked):
            raise ReplayError(
                "torch.autograd.grad or backward(inputs=) asks for the gradient of a parameter that a graphed "
                "microbatch adds to main_grad for data parallelism, past autograd; run such a microbatch eager"
            )


def _behind(roots: Sequence[Tensor | GradientEdge]) -> set[Node]:
    """Return the nodes that a backward from some roots may run."""
    waiting = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [after for after, _ in node.next_functions]
    return seen


class _InputsGuard:
    """Looks at the inputs that a backward is asked for, in PyTorch's call of its engine, while replays may come.

    Autograd cannot reach parameters of which it does not know: it would give None, or add nothing without a word.
    """

    def __init__(self) -> None:
        self._pending: WeakSet[PendingReplays] = WeakSet()
        self._autograd: Any = torch.autograd
        self._original: Any = None

    def add(self, pending: PendingReplays) -> None:
        """Look at the inputs of backwards that may run these replays."""
        self._pending.add(pending)
        if self._original is None:
            self._original = self._autograd._engine_run_backward
            self._autograd._engine_run_backward = self._run_backward

    def discard(self, pending: PendingReplays) -> None:
        """End this; PyTorch's function comes back with the last one."""
        self._pending.discard(pending)
        if not self._pending and self._original is not None:
            self._autograd._engine_run_backward, self._original = self._original, None

    def _run_backward(self, roots: Sequence[Tensor | GradientEdge], *args: Any, **kwargs: Any) -> Any:
        for inputs in filter(None, args[INPUTS : INPUTS + 1]):
            asked = {
                getattr(each.node, "variable", None) if isinstance(each, GradientEdge) else each for each in inputs
            }
            for pending in tuple(self._pending):
                pending.refuse(roots, asked)
        return self._original(roots, *args, **kwargs)


INPUTS_GUARD = _InputsGuard()
