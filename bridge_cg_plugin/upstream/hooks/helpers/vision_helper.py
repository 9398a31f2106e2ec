"""Graphs of a vision or audio encoder, with what their model needs around them."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from ....graphs.recordings.executor import Executor
from ....options import VisionGraphOptions, audio_options, vision_options
from ....vision.workload import VisionWorkload
from ...encoders.registry import FoundEncoder, find_encoder
from ...environment import check_process
from ...parallel.process_groups import (
    consensus_of,
    microbatches_in_flight,
    shared_group,
    tensor_group,
    without_collectives,
)
from ...wrappers import chunks_of
from ..batches import GRIDS
from ..between import early_reads
from .graph_helper import GraphHelper, default_executor, drop_graphs, graphs_over


def encoder_helper(
    model: nn.Module | Sequence[nn.Module],
    config: Any,
    *,
    found: FoundEncoder | None = None,
    options: VisionGraphOptions | None = None,
    num_microbatches: int = 1,
    executor: Executor | None = None,
    releasable: bool = False,
) -> GraphHelper:
    """Put an encoder on graphs, before a capture.

    Args:
        model: The training loop's model chunks, or a vision model itself.
        config: Config with the options, where that of the model around the encoder has none.
        found: The encoder; None takes the model's first.
        options: Options; None reads them from the model's provider.
        num_microbatches: Microbatches of a step, an upper bound for those in flight.
        executor: Makes recordings; None takes CUDA graphs on a GPU.
        releasable: Whether memory of graphs may leave the device between steps.

    Raises:
        OptionError: An option cannot work.
    """
    found = found or find_encoder(model)
    assert found is not None, f"{type(model).__name__} has no encoder that is declared"
    vision_model, holder, family = found
    provider = getattr(holder, "config", None)
    source = provider if hasattr(provider, "vision_cuda_graph_impl") else config
    options = options or encoder_options(source, found)
    check_process()
    drop_graphs(vision_model)
    tensor = tensor_group(vision_model)
    graphs = graphs_over(
        chunks_of(model),
        vision_model,
        VisionWorkload(vision_model, options, family, GRIDS),
        executor
        or default_executor(
            isolated=without_collectives(tensor),
            shared=tensor is not None,
            side_stream=options.streams != 1,
            releasable=releasable,
            replays_aside=options.offloads,
        ),
        consensus=consensus_of(shared_group(vision_model)),
        bucket_consensus=consensus_of(tensor),
    )
    gather = graphs.surroundings.before_replay
    if gather is not None:
        graphs.at_detach.push(gather_without_images(holder, vision_model, gather))
    graphs.at_detach.push(early_reads(holder))
    return GraphHelper(graphs, options.slots, partial(microbatches_in_flight, source, num_microbatches))


def gather_without_images(holder: nn.Module, vision_model: nn.Module, gather: Callable[[], None]) -> ExitStack:
    """Wait for gathered parameters of an encoder in microbatches that do not call it, where other ranks do in theirs.

    The token embedding, which every microbatch calls after the encoder, is where it shows that there was no image.

    Args:
        holder: The module that holds the vision model and the language model.
        vision_model: The vision model.
        gather: Waits for the encoder's parameters. Data-parallel ranks share a communicator, so all gather in one
            order, before anything of the language model's.

    Returns:
        What takes the hooks off.
    """
    embedding = getattr(getattr(holder, "language_model", None), "embedding", None)
    due: list[bool] = []
    handles = ExitStack()

    def before_embedding(*unused: Any) -> None:
        if due:
            due.clear()
            gather()

    if embedding is not None:
        handles.enter_context(holder.register_forward_pre_hook(lambda *unused: due.append(True)))
        handles.enter_context(vision_model.register_forward_pre_hook(lambda *unused: due.clear()))
        handles.enter_context(embedding.register_forward_pre_hook(before_embedding, prepend=True))
    return handles


def encoder_options(source: Any, found: FoundEncoder) -> VisionGraphOptions:
    """Return the options of an encoder that an object has in its fields.

    Raises:
        OptionError: A value cannot work with this encoder.
    """
    if found.family.encodes == "audio":
        return audio_options(vision_options(source))
    encoder = found.family.encoder(found.model)
    return vision_options(source, encoder.unit, encoder.unit_of)
