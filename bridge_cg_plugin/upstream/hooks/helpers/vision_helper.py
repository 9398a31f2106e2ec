"""The helper of an encoder's graphs, and what Bridge's loop asks of its own."""

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
from ..between import EarlyReads
from .graph_helper import GraphHelper, default_executor, graphs_over, release_module


class VisionTECudaGraphHelper(GraphHelper):
    """Vision-encoder graphs behind the interface of megatron-core's class of this name.

    Args:
        model: The training loop's model chunks, or a vision model itself.
        vision_config: Config with the options, where that of the model around the encoder has none.
        vision_seq_length: Upstream's single capture length; the options say what is captured.
        micro_batch_size: Unused: a microbatch's images are concatenated along the sequence.
        num_microbatches: Microbatches of a step, an upper bound for those in flight.
        pg_collection: Unused, for the interface.
        options: Options; None reads them from the model's provider.
        executor: Makes recordings; None takes CUDA graphs on a GPU.
        found: The encoder; None takes the model's first.
        releasable: Whether memory of graphs may leave the device between steps.

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
        found: FoundEncoder | None = None,
        releasable: bool = False,
    ) -> None:
        found = found or find_encoder(model)
        if found is None:
            return
        vision_model, holder, family = found
        provider = getattr(holder, "config", None)
        source = provider if hasattr(provider, "vision_cuda_graph_impl") else vision_config
        self.options = options or encoder_options(source, found)
        check_process()
        release_module(vision_model)
        tensor = tensor_group(vision_model)
        graphs = graphs_over(
            chunks_of(model),
            vision_model,
            VisionWorkload(vision_model, self.options, family, GRIDS),
            executor
            or default_executor(
                isolated=without_collectives(tensor),
                shared=tensor is not None,
                side_stream=self.options.streams != 1,
                releasable=releasable,
                replays_aside=self.options.offloads,
            ),
            consensus=consensus_of(shared_group(vision_model)),
            bucket_consensus=consensus_of(tensor),
        )
        gather = graphs.surroundings.before_replay
        if gather is not None:
            graphs.at_detach.callback(TextOnlyMicrobatches(holder, vision_model, gather).remove)
        graphs.at_detach.callback(EarlyReads(holder).remove)
        self.take(graphs, self.options.slots, partial(microbatches_in_flight, source, num_microbatches))


class TextOnlyMicrobatches:
    """Waits for gathered parameters of an encoder in microbatches that do not call it, where other ranks do in theirs.

    The token embedding, which every microbatch calls after the encoder, is where it shows that there was no image.

    Args:
        holder: The module that holds the vision model and the language model.
        vision_model: The vision model.
        gather: Waits for the encoder's parameters. Data-parallel ranks share a communicator, so all gather in one
            order, before anything of the language model's.
    """

    def __init__(self, holder: nn.Module, vision_model: nn.Module, gather: Callable[[], None]) -> None:
        self._gather, self._due = gather, False
        embedding = getattr(getattr(holder, "language_model", None), "embedding", None)
        self._handles = ExitStack()
        if embedding is not None:
            self._handles.enter_context(holder.register_forward_pre_hook(self._began))
            self._handles.enter_context(vision_model.register_forward_pre_hook(self._has_images))
            self._handles.enter_context(embedding.register_forward_pre_hook(self._before_embedding, prepend=True))

    def remove(self) -> None:
        """Take the hooks off."""
        self._handles.close()

    def _began(self, *unused: Any) -> None:
        self._due = True

    def _has_images(self, *unused: Any) -> None:
        self._due = False

    def _before_embedding(self, *unused: Any) -> None:
        if self._due:
            self._due = False
            self._gather()


def encoder_options(source: Any, found: FoundEncoder) -> VisionGraphOptions:
    """Return the options of an encoder that an object has in its fields.

    Raises:
        OptionError: A value cannot work with this encoder.
    """
    if found.family.encodes == "audio":
        return audio_options(vision_options(source))
    encoder = found.family.encoder(found.model)
    return vision_options(source, encoder.unit, encoder.unit_of)


def get_vision_cuda_graph_seq_length(vision_config: Any, default_seq_length: int = 4096) -> int:
    """Return the tokens of the largest vision bucket as far as the configuration sets it, for upstream's log line."""
    longest = getattr(vision_config, "max_vision_cuda_graph_seq_length", None)
    return longest or getattr(vision_config, "num_position_embeddings", None) or default_seq_length
