"""Graphs over modules of a training loop's model, and which there are."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from torch import nn

from ....announce import announce
from ....graphs.manager import GraphManager
from ....graphs.program import SINGLE_RANK, RankConsensus, Surroundings, Workload
from ....graphs.recordings.executor import CudaGraphExecutor, Executor, Isolated, ReferenceExecutor
from ...environment import sizes_may_share_memory
from ...parallel.data_parallel import megatron_reduction
from ...parallel.watchdog import WATCHDOG
from ...seams.activation import before_deactivation
from ...seams.own_code import EXEMPT

# Of graphs that modules are on, oldest first.
_helpers: "weakref.WeakKeyDictionary[GraphHelper, None]" = weakref.WeakKeyDictionary()


class GraphHelper:
    """The graphs of one module in a training loop: slots counted, captured, reported, dropped.

    Args:
        graphs: The module's graphs.
        slots: What the options say.
        in_flight: Counts them where that is "auto".

    Attributes:
        graphs: The module's graphs; None once they are dropped.
    """

    def __init__(self, graphs: GraphManager, slots: int | Literal["auto"], in_flight: Callable[[], int]) -> None:
        self._slots = in_flight if slots == "auto" else lambda: slots
        self.graphs: GraphManager | None = graphs
        graphs.slots = self._slots()
        _helpers[self] = None
        graphs.at_detach.callback(_helpers.pop, self, None)

    def create_cudagraphs(self) -> None:
        """Capture; on failure the module goes on eager unless the options say strict.

        Slots are counted now: a callback may have changed the run's batch sizes since this helper was made.
        """
        if self.graphs is not None:
            self.graphs.slots = self._slots()
            with WATCHDOG.during("capture"):
                self.graphs.capture()

    def is_due(self, warmup_steps: float) -> bool:
        """Whether to capture before the next step, after so many others, or to try once more what failed."""
        graphs = self.graphs
        if graphs is None or not graphs.capture_due:
            return False
        return graphs.step_number >= warmup_steps or graphs.failure is not None

    def delete_cuda_graphs(self) -> None:
        """Report and drop the graphs, if there are any; the module gets its own forward back."""
        if self.graphs is not None:
            announce(self.graphs.report())
            self.graphs.detach()
            self.graphs = None


def graphs_over(
    chunks: Sequence[nn.Module],
    module: nn.Module,
    workload: Workload,
    executor: Executor,
    *,
    consensus: RankConsensus = SINGLE_RANK,
    bucket_consensus: RankConsensus = SINGLE_RANK,
) -> GraphManager:
    """Return graphs of a module of the training loop's chunks; until they are detached its reductions keep an order.

    See `Surroundings`.
    """
    reduction = megatron_reduction(chunks, module)
    order = None if reduction is None else reduction.order()
    surroundings = Surroundings(
        before_replay=None if reduction is None else reduction.gather,
        reduction=reduction,
        exempt=EXEMPT,
        consensus=consensus,
        bucket_consensus=bucket_consensus,
    )
    graphs = GraphManager(module, workload, executor, surroundings)
    if order is not None:
        order.keep(graphs.adds_later)
        graphs.at_detach.callback(order.remove)
    return graphs


def active_helpers() -> list[GraphHelper]:
    """Return the helpers whose module is still theirs, oldest first: in one order on all ranks."""
    return list(_helpers)


def any_on_graphs() -> bool:
    """Whether some module is on graphs of the plugin, or is to be after warm-up steps. Any thread may ask."""
    return len(_helpers) > 0


def active_graphs() -> list[GraphManager]:
    """Return the graphs of the helpers whose module is still theirs, oldest first."""
    return [helper.graphs for helper in active_helpers() if helper.graphs is not None]


def drop_graphs(module: nn.Module | None = None) -> None:
    """Report and drop the graphs of a module; of every module without one."""
    for helper in active_helpers():
        if module is None or (helper.graphs is not None and helper.graphs.model is module):
            helper.delete_cuda_graphs()


before_deactivation(drop_graphs)


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
