"""What Bridge's train loop drives: the interface of megatron-core's graph helpers over graphed modules."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ....announce import announce
from ....graphs.manager import GraphManager
from ....graphs.program import SINGLE_RANK, RankConsensus, Surroundings, Workload
from ....graphs.recordings.executor import CudaGraphExecutor, Executor, Isolated, ReferenceExecutor
from ....options import PROVIDER_FIELDS
from ....options.language_model import IMPL
from ....options.packed import MAX_PACKED_SEQS
from ...environment import sizes_may_share_memory
from ...parallel.data_parallel import megatron_reduction
from ...parallel.watchdog import WATCHDOG, named_failure
from ...seams.activation import before_deactivation
from ...seams.own_code import EXEMPT

# Of graphs that modules are on, oldest first.
_owners: "weakref.WeakKeyDictionary[GraphManager, weakref.ref[GraphHelper]]" = weakref.WeakKeyDictionary()


class GraphHelper:
    """Captures, reports and deletes the graphs of one module, as the train loop asks for it.

    Attributes:
        graphs: The module's graphs; None where there is nothing to capture, or nothing left.
    """

    graphs: GraphManager | None = None
    _slots: Callable[[], int]

    def create_cudagraphs(self) -> None:
        """Capture; on failure the module goes on eager unless the options say strict.

        Slots are counted now: a callback may have changed the run's batch sizes since this helper was made.
        """
        if self.graphs is not None:
            self.graphs.slots = self._slots()
            with named_failure("capture"), WATCHDOG.during("capture"):
                self.graphs.capture()

    def is_due(self, warmup_steps: float) -> bool:
        """Whether to capture before the next step, after so many others, or to try once more what failed."""
        graphs = self.graphs
        if graphs is None or not graphs.capture_due:
            return False
        return graphs.step_number >= warmup_steps or graphs.failure is not None

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

    def take(self, graphs: GraphManager, slots: int | Literal["auto"], in_flight: Callable[[], int]) -> None:
        """Make these graphs this helper's.

        Args:
            graphs: The module's graphs.
            slots: What the options say.
            in_flight: Counts them where that is "auto".
        """
        self._slots = in_flight if slots == "auto" else lambda: slots
        self.graphs, graphs.slots = graphs, self._slots()
        _owners[graphs] = weakref.ref(self)
        graphs.at_detach.callback(_owners.pop, graphs, None)


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
    return [helper for owner in list(_owners.values()) if (helper := owner()) is not None]


def any_on_graphs() -> bool:
    """Whether some module is on graphs of the plugin, or is to be after warm-up steps. Any thread may ask."""
    return len(_owners) > 0


def active_graphs() -> list[GraphManager]:
    """Return the graphs of the helpers whose module is still theirs, oldest first."""
    return [helper.graphs for helper in active_helpers() if helper.graphs is not None]


def modules_on_graphs(chunks: Sequence[nn.Module]) -> set[nn.Module]:
    """Return the modules of a model that are on some helper's graphs, or are to be."""
    graphed = {graphs.model for graphs in active_graphs()}
    return graphed and graphed.intersection(module for chunk in chunks for module in chunk.modules())


def drop_graphs(also: Callable[[GraphManager], bool] = lambda graphs: False) -> None:
    """Report and drop graphs of runs that ended with an error, whose helpers are gone, and others that are meant."""
    for graphs, owner in list(_owners.items()):
        if (helper := owner()) is None:
            announce(graphs.report())
            graphs.detach()
        elif also(graphs):
            helper.delete_cuda_graphs()


before_deactivation(partial(drop_graphs, lambda graphs: True))


def release_module(module: nn.Module) -> None:
    """Take a module from a helper that a run left behind when it ended with an error."""
    drop_graphs(lambda graphs: graphs.model is module)


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


def asks_for_vision_graphs(config: Any) -> bool:
    """Whether a model's config has vision graphs on."""
    return getattr(config, PROVIDER_FIELDS["impl"], None) not in (None, "none")


def asks_for_packed_graphs(config: Any) -> bool:
    """Whether a model's config has packed-sequence graphs on."""
    return getattr(config, MAX_PACKED_SEQS, None) is not None and getattr(config, IMPL, None) == "transformer_engine"


def asks_for_graphs(config: Any) -> bool:
    """Whether a model's config has graphs on, of the vision encoder or the language model; alike on all ranks."""
    return asks_for_vision_graphs(config) or getattr(config, IMPL, None) not in (None, "none")
