"""The object that Bridge's train loop drives to capture vision graphs."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..announce import announce
from ..graphs.executor import CudaGraphExecutor, Executor, ReferenceExecutor
from ..options import VisionGraphOptions, check_combinations, vision_options
from ..vision.encoder import VisionGraphs
from ..vision.grids import HostGrids
from .data_parallel import gradient_reduction, parameter_gather
from .environment import check_process
from .qwen3_vl import QWEN3_VL, find_vision_model

GRIDS = HostGrids()
_active: "weakref.WeakSet[VisionTECudaGraphHelper]" = weakref.WeakSet()


def active_helpers() -> list["VisionTECudaGraphHelper"]:
    """Return the helpers whose vision model is still theirs."""
    return [helper for helper in _active if helper.graphs is not None]


def default_executor(generators: Callable[[], Sequence[torch.Generator]] = tuple) -> Executor:
    """Return what can record on this machine; `generators` are those that recorded work may draw from."""
    return CudaGraphExecutor(generators=generators) if torch.cuda.is_available() else ReferenceExecutor()


class VisionTECudaGraphHelper:
    """Vision-encoder graphs behind the interface of megatron-core's class of this name.

    Args:
        model: The training loop's model chunks, or a vision model itself.
        vision_config: The vision encoder's transformer config.
        vision_seq_length: Upstream's single capture length; the options say what is captured.
        micro_batch_size: Unused: a microbatch's images are concatenated along the sequence.
        num_microbatches: Microbatches of a step, an upper bound for those in flight.
        pg_collection: Unused, for the interface.
        options: Options; None reads them from the model's provider.
        executor: Makes recordings; None takes CUDA graphs on a GPU.

    Raises:
        OptionError: An option cannot work.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        vision_config: Any,
        vision_seq_length: int = 0,
        micro_batch_size: int = 1,
        num_microbatches: int = 1,
        pg_collection: Any = None,
        *,
        options: VisionGraphOptions | None = None,
        executor: Executor | None = None,
    ) -> None:
        self.graphs: VisionGraphs | None = None
        found = find_vision_model(model)
        if found is None:
            return
        vision_model, holder = found
        provider = getattr(holder, "config", None)
        source = provider if hasattr(provider, "vision_cuda_graph_impl") else vision_config
        self.options = options or vision_options(source, vision_config.spatial_merge_size**2)
        check_combinations(self.options)
        check_process()
        for other in active_helpers():
            if other.graphs.model is vision_model:  # left behind by a run that ended with an error
                other.delete_cuda_graphs()
        chunks = [model] if isinstance(model, nn.Module) else model
        self.graphs = VisionGraphs(
            vision_model,
            self.options,
            QWEN3_VL,
            executor or default_executor(),
            slots=microbatches_in_flight(source, num_microbatches),
            before_replay=parameter_gather(chunks, vision_model),
            reduction=gradient_reduction(chunks, vision_model, pipelined=stages_of(source) > 1),
            grids=GRIDS,
        )
        _active.add(self)

    def create_cudagraphs(self) -> None:
        """Capture; on failure the encoder goes on eager unless the options say strict."""
        if self.graphs is not None:
            self.graphs.capture()

    def graphs_created(self) -> bool:
        """Whether graphs exist."""
        return self.graphs is not None and self.graphs.captured

    def cuda_graph_set_manual_hooks(self) -> None:
        """Nothing to set: every replay waits for the parameters itself."""

    def delete_cuda_graphs(self) -> None:
        """Report and drop the graphs, if there are any; the vision model gets its own forward back."""
        if self.graphs is None:
            return
        announce(self.graphs.report())
        self.graphs.detach()
        self.graphs = None


def get_vision_cuda_graph_seq_length(vision_config: Any, default_seq_length: int = 4096) -> int:
    """Return the tokens of the largest vision bucket as far as the configuration says, for upstream's log line."""
    longest = getattr(vision_config, "max_vision_cuda_graph_seq_length", None)
    return longest or getattr(vision_config, "num_position_embeddings", None) or default_seq_length


def stages_of(config: Any) -> int:
    """Return the pipeline's stages."""
    return getattr(config, "pipeline_model_parallel_size", None) or 1


def microbatches_in_flight(config: Any, num_microbatches: int) -> int:
    """Return how many microbatches the first pipeline stage holds between forward and backward under 1F1B."""
    stages = stages_of(config)
    interleaved = (getattr(config, "virtual_pipeline_model_parallel_size", None) or 1) > 1
    return max(1, min(stages * (2 if interleaved and stages > 1 else 1), num_microbatches))
