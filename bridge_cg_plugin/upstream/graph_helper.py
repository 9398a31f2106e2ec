"""What Bridge's train loop drives: the interface of megatron-core's graph helpers over graphed modules."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ..announce import announce
from ..graphs.executor import CudaGraphExecutor, Executor, Isolated, ReferenceExecutor
from ..graphs.graphed_module import GraphedModule
from ..options import PROVIDER_FIELDS
from .failures import named_failure

_active: "weakref.WeakSet[GraphHelper]" = weakref.WeakSet()


class GraphHelper:
    """Captures, reports and deletes the graphs of one module, as the train loop asks for it.

    Attributes:
        graphs: The module's graphs; None where there is nothing to capture, or nothing left.
    """

    graphs: GraphedModule | None = None

    def create_cudagraphs(self) -> None:
        """Capture; on failure the module goes on eager unless the options say strict."""
        if self.graphs is not None:
            with named_failure("capture"):
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

    def _take(self, graphs: GraphedModule) -> None:
        self.graphs = graphs
        _active.add(self)


def active_helpers() -> list[GraphHelper]:
    """Return the helpers whose module is still theirs."""
    return [helper for helper in _active if helper.graphs is not None]


def release_module(module: nn.Module) -> None:
    """Take a module from a helper that a run left behind when it ended with an error."""
    for helper in active_helpers():
        if helper.graphs is not None and helper.graphs.model is module:
            helper.delete_cuda_graphs()


def default_executor(
    generators: Callable[[], Sequence[torch.Generator]] = tuple, isolated: Isolated = nullcontext
) -> Executor:
    """Return what can record on this machine.

    Args:
        generators: Returns what recorded work may draw random numbers from.
        isolated: Entered around passes whose values nobody reads.
    """
    if not torch.cuda.is_available():
        return ReferenceExecutor(isolated=isolated)
    return CudaGraphExecutor(generators=generators, isolated=isolated)


def stages_of(config: Any) -> int:
    """Return the pipeline's stages."""
    return getattr(config, "pipeline_model_parallel_size", None) or 1


def microbatches_in_flight(config: Any, num_microbatches: int) -> int:
    """Return how many microbatches the first pipeline stage holds between forward and backward under 1F1B.

    Args:
        config: Has the pipeline's stages.
        num_microbatches: Microbatches of a step now; the run's largest step counts.
    """
    stages = stages_of(config)
    interleaved = (getattr(config, "virtual_pipeline_model_parallel_size", None) or 1) > 1
    return max(1, min(stages * (2 if interleaved and stages > 1 else 1), most_microbatches(num_microbatches)))


def most_microbatches(num_microbatches: int) -> int:
    """Return how many microbatches the run's largest step has: a schedule of batch sizes may begin with fewer."""
    from megatron.core import num_microbatches_calculator

    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    samples = getattr(calculator, "micro_batch_times_data_parallel_size", None)
    if samples is None:  # every step has as many
        return num_microbatches
    batches = [batch for _, batch in getattr(calculator, "schedule", ())]
    return max(num_microbatches, *(batch // samples for batch in (calculator.global_batch_size, *batches)))


def asks_for_graphs(config: Any) -> bool:
    """Whether a model's provider has graphs on, of the vision encoder or the language model; alike on all ranks."""
    names = (PROVIDER_FIELDS["impl"], "cuda_graph_impl")
    return any(getattr(config, name, None) not in (None, "none") for name in names)


WRAPPER_DEPTH = 8


def unwrapped(model: nn.Module) -> list[nn.Module]:
    """Return a model and what its wrappers hold, outermost first."""
    found = []
    for _ in range(WRAPPER_DEPTH):
        found.append(model)
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return found
