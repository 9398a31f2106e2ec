"""What Bridge's train loop drives: the interface of megatron-core's graph helpers over graphed modules."""

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ....announce import announce
from ....graphs.manager import GraphManager
from ....graphs.recordings.executor import CudaGraphExecutor, Executor, Isolated, ReferenceExecutor
from ....options import PROVIDER_FIELDS
from ...environment import sizes_may_share_memory
from ...parallel.data_parallel import ReductionOrder
from ...parallel.watchdog import WATCHDOG, named_failure
from ...seams.activation import before_deactivation

_active: "weakref.WeakSet[GraphHelper]" = weakref.WeakSet()
# Of graphs that modules are on.
_owners: "weakref.WeakKeyDictionary[GraphManager, weakref.ref[GraphHelper]]" = weakref.WeakKeyDictionary()
_numbers = itertools.count()


class GraphHelper:
    """Captures, reports and deletes the graphs of one module, as the train loop asks for it.

    Attributes:
        graphs: The module's graphs; None where there is nothing to capture, or nothing left.
        asked: Whether the train loop has asked for graphs.
    """

    graphs: GraphManager | None = None
    asked = False
    _in_flight: Callable[[], int] | None = None
    _number = 0

    def create_cudagraphs(self) -> None:
        """Capture; on failure the module goes on eager unless the options say strict.

        Slots are counted now: a callback may have changed the run's batch sizes since this helper was made.
        """
        self.asked = True
        if self.graphs is not None:
            if self._in_flight is not None:
                self.graphs.slots = self._in_flight()
            with named_failure("capture"), WATCHDOG.during("capture"):
                self.graphs.capture()

    def graphs_created(self) -> bool:
        """Whether graphs exist."""
        return self.graphs is not None and self.graphs.captured

    def cuda_graph_set_manual_hooks(self) -> None:
        """Nothing to set: every replay waits for the parameters itself."""

    def delete_cuda_graphs(self) -> None:
        """Report and drop the graphs, if there are any; the module gets its own forward back."""
        if self.graphs is None:
            return
        announce(self.graphs.report())
        self.graphs.detach()
        self.graphs = None
        _active.discard(self)

    def _take(
        self, graphs: GraphManager, in_flight: Callable[[], int] | None, order: ReductionOrder | None = None
    ) -> None:
        """Make these graphs this helper's.

        Args:
            graphs: The module's graphs.
            in_flight: Counts the slots; None where the options say how many.
            order: Of the module's gradient reductions, kept while the graphs are this helper's.
        """
        self.graphs, self._in_flight = graphs, in_flight
        self._number = next(_numbers)
        if order is not None:
            order.keep(graphs.adds_later)
            graphs.at_detach.callback(order.remove)
        _active.add(self)
        _owners[graphs] = weakref.ref(self)
        graphs.at_detach.callback(_owners.pop, graphs, None)


def active_helpers() -> list[GraphHelper]:
    """Return the helpers whose module is still theirs, oldest first: in one order on all ranks."""
    return sorted((helper for helper in _active if helper.graphs is not None), key=lambda helper: helper._number)


def any_on_graphs() -> bool:
    """Whether some module is on graphs of the plugin, or is to be after warm-up steps. Any thread may ask."""
    return len(_active) > 0


def active_graphs() -> list[GraphManager]:
    """Return the graphs of the helpers whose module is still theirs, oldest first."""
    return [helper.graphs for helper in active_helpers() if helper.graphs is not None]


def modules_on_graphs(chunks: Sequence[nn.Module]) -> set[nn.Module]:
    """Return the modules of a model that are on some helper's graphs, or are to be."""
    graphed = {graphs.model for graphs in active_graphs()}
    return graphed and graphed.intersection(module for chunk in chunks for module in chunk.modules())


def drop_left_behind() -> None:
    """Report and drop graphs of runs that ended with an error: their helpers are gone, modules are on them still."""
    for graphs, owner in list(_owners.items()):
        if owner() is None:
            announce(graphs.report())
            graphs.detach()


def _drop_graphs() -> None:
    drop_left_behind()
    for helper in active_helpers():
        helper.delete_cuda_graphs()


before_deactivation(_drop_graphs)


def release_module(module: nn.Module) -> None:
    """Take a module from a helper that a run left behind when it ended with an error."""
    drop_left_behind()
    for helper in active_helpers():
        if helper.graphs is not None and helper.graphs.model is module:
            helper.delete_cuda_graphs()


def default_executor(
    generators: Callable[[], Sequence[torch.Generator]] = tuple,
    isolated: Isolated = nullcontext,
    shared: bool = False,
    side_stream: bool = False,
    releasable: bool = False,
    replays_aside: bool = False,
) -> Executor:
    """Return what can record on this machine.

    Args:
        generators: Returns what recorded work may draw random numbers from.
        isolated: Entered around passes whose values nobody reads.
        shared: Whether other ranks share what is recorded, so that a replay may wait for one of them.
        side_stream: Whether recordings may have side work.
        releasable: Whether memory of recordings may leave the device. That of exchanges with other ranks may not: NCCL
            may have given it to them.
        replays_aside: Whether graphs that offload replay on a stream of their own; the main stream waits for their
            results only.
    """
    if not torch.cuda.is_available():
        return ReferenceExecutor(isolated=isolated)
    launched = WATCHDOG.launched if shared else None
    releasable = releasable and not shared
    return CudaGraphExecutor(
        generators=generators,
        isolated=isolated,
        launched=launched,
        cuda_graph_stream=torch.cuda.Stream() if replays_aside else None,
        cuda_graph_event=torch.cuda.Event(external=True) if replays_aside else None,
        side_stream=side_stream,
        arenas=not shared or sizes_may_share_memory(),
        releasable=releasable,
    )


def asks_for_graphs(config: Any) -> bool:
    """Whether a model's provider has graphs on, of the vision encoder or the language model; alike on all ranks."""
    names = (PROVIDER_FIELDS["impl"], "cuda_graph_impl")
    return any(getattr(config, name, None) not in (None, "none") for name in names)
