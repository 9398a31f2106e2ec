"""Replayed backwards to come, of whose parameters autograd does not know."""

from collections.abc import Set
from itertools import chain
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd.graph import Node

# What PyTorch calls the backward under way where there is none.
NO_BACKWARD = -1
# Whether the backward under way runs a node of the autograd graph.
WILL_RUN = torch._C._will_engine_execute_node


class PendingReplays:
    """Replayed backwards that are to come, of all recordings of a region, and those of the backward under way.

    The reduction is notified once per backward, when the last replay has added its part.
    """

    def __init__(self) -> None:
        self._accumulated: WeakKeyDictionary[Node, frozenset[nn.Parameter]] = WeakKeyDictionary()
        self._done: list[tuple[nn.Parameter, ...]] = []
        self._backward = NO_BACKWARD

    def expect(self, node: Node, accumulated: frozenset[nn.Parameter]) -> None:
        """Note that a replay's backward is to come, and the parameters to whose `main_grad` it adds."""
        self._accumulated[node] = accumulated

    def ran(self, node: Node, accumulated: tuple[nn.Parameter, ...]) -> None:
        """Note that the backward under way has replayed it."""
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
