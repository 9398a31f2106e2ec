"""Graphs of a model's encoders, with what their model needs around them, and of a decoder's layers.

Bridge's step of a model that takes images reads sizes on the host, and megatron-core's full_iteration makes no images
static: there the step runs as it is, under any schedule, and the layers of each stage inside it replay a graph of their
forward and one of their backward in every microbatch.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

from torch import distributed, nn

from ....announce import announce
from ....graphs.manager import GraphManager
from ....graphs.recordings.executor import Executor, Isolated
from ....language.packed.workload import PackedWorkload
from ....options import GraphOptions, PackedOptions, VisionGraphOptions, check_options, vision_options
from ....options.declaration import plain
from ....options.facts import Facts
from ....options.normalization import held_options
from ....options.sources import collect
from ....options.vision import audio_options
from ....vision.workload import VisionWorkload
from ...decoder.block import DEEPSTACK, TransformerBlockFamily
from ...decoder.layers import levels
from ...encoders.registry import FoundEncoder, find_encoders
from ...environment import check_process
from ...kernels.recompute import LAYERS_AGAIN, lists_differentiated, random_states
from ...parallel.process_groups import (
    consensus_of,
    expert_group,
    has_ranks,
    microbatches_in_flight,
    new_group,
    shared_group,
    sharing_groups,
    tensor_group,
    without_collectives,
)
from ...seams.patches import Patch
from ...seams.registry import seam
from ...wrappers import chunks_of, holders
from ..batches import GRIDS, PACK_OFFSETS
from ..between import early_reads
from .graph_helper import GraphHelper, default_executor, drop_graphs, graphs_over


def encoder_helper(
    model: nn.Module | Sequence[nn.Module],
    config: Any,
    *,
    options: VisionGraphOptions,
    found: FoundEncoder | None = None,
    num_microbatches: int = 1,
    executor: Executor | None = None,
    releasable: bool = False,
) -> GraphHelper:
    """Put an encoder on graphs, before a capture.

    Args:
        model: The training loop's model chunks, or a vision model itself.
        config: Of the pipeline, where that of the model around the encoder has no graph options.
        options: Of its graphs.
        found: The encoder; None takes the model's first.
        num_microbatches: Microbatches of a step, an upper bound for those in flight.
        executor: Makes recordings; None takes CUDA graphs on a GPU.
        releasable: Whether memory of graphs may leave the device between steps.

    Raises:
        OptionError: An option cannot work.
    """
    vision_model, holder, family = found or find_encoders(model)[0]
    provider = getattr(holder, "config", None)
    source = provider if hasattr(provider, "vision_cuda_graph_impl") else config
    check_process()
    drop_graphs(vision_model)
    tensor = tensor_group(vision_model)
    graphs = graphs_over(
        chunks_of(model),
        vision_model,
        VisionWorkload(vision_model, options, family, GRIDS),
        executor
        or default_executor(
            random_states,
            without_collectives(tensor),
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
    if hasattr(decoder := getattr(vision_model, "decoder", None), LAYERS_AGAIN):
        graphs.at_detach.enter_context(lists_differentiated(decoder))
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


def decoder_helpers(
    chunks: Sequence[nn.Module],
    config: Any,
    *,
    options: GraphOptions | None = None,
    num_microbatches: int = 1,
    executor: Executor | None = None,
    releasable: bool = False,
) -> list[GraphHelper]:
    """Put the layers of every chunk's decoder on graphs, before a capture.

    Microbatches are packs where the options say so, else padded rows.

    Args:
        chunks: The training loop's model chunks.
        config: The language model's transformer config.
        options: Options, checked; None reads and checks those of the config.
        num_microbatches: Microbatches of a step; megatron-core may run more.
        executor: Makes recordings; None takes CUDA graphs on a GPU.
        releasable: Whether memory of graphs may leave the device between steps.

    Raises:
        OptionError: An option cannot work with this model.
    """
    options = options or checked_options(config)
    check_process()
    in_flight = partial(microbatches_in_flight, config, num_microbatches)
    made = (_decoder_graphs(decoder, options, chunks, executor, releasable) for decoder in find_decoders(chunks))
    helpers = [GraphHelper(graphs, _packed(options).slots, in_flight) for graphs in made]
    if helpers and getattr(config, "mtp_num_layers", None):
        announce("multi-token prediction runs eager, as output layer and losses do; the layers before it do not")
    return helpers


def _decoder_graphs(
    decoder: nn.Module, options: GraphOptions, chunks: Sequence[nn.Module], executor: Executor | None, releasable: bool
) -> GraphManager:
    """Return graphs of one decoder's layers; arguments as for `decoder_helpers`."""
    drop_graphs(decoder)
    packed = _packed(options)
    modules = options.padded_parts or plain(options.language_model.modules)
    family = TransformerBlockFamily(decoder, packed.enabled)
    family.parts(modules)  # what cannot be recorded is refused before a step is trained
    experts = None if family.exchange is None else expert_group(decoder)
    consensus = consensus_of(shared_group(decoder, experts))
    return graphs_over(
        chunks,
        decoder,
        PackedWorkload(packed, modules, family, PACK_OFFSETS, _peers(decoder, experts), _deepstack(chunks, decoder)),
        executor
        or default_executor(
            random_states,
            without_exchanges(decoder, experts),
            shared=experts is not None or bool(sharing_groups(decoder)),
            releasable=releasable,
            replays_aside=packed.offloads,
        ),
        consensus=consensus,
        bucket_consensus=consensus,
    )


def _packed(options: GraphOptions) -> PackedOptions:
    """Return the options of packs, or those of padded rows, whose gradients are rounded as eager's are."""
    return options.packed if options.packed.enabled else PackedOptions(gradient_accumulation_fusion=False)


def checked_options(config: Any) -> GraphOptions:
    """Return the options that a model's config holds.

    Raises:
        OptionError: They cannot work.
    """
    options = held_options(config)
    check_options(options, collect(config).facts)
    return options


def find_decoders(chunks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the language-model decoder of every chunk that has layers, under any wrapper."""
    found: list[nn.Module] = []
    for modules in map(holders, chunks):
        models = (model for module in modules for model in (getattr(module, "language_model", None), module))
        decoders = (getattr(model, "decoder", None) for model in models)
        found += islice((d for d in decoders if isinstance(d, nn.Module) and len(getattr(d, "layers", ()))), 1)
    return found


def _deepstack(chunks: Sequence[nn.Module], decoder: nn.Module) -> int:
    """Return behind how many layers a decoder adds features of images: upstream has them all on the first stage."""
    if not hasattr(decoder, DEEPSTACK):
        return 0
    for model in holders(chunks):
        if getattr(getattr(model, "language_model", None), "decoder", None) is decoder:
            tower = getattr(model, "vision_model", None) or getattr(model, "visual", None)
            vision = getattr(tower, "config", None)
            return len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return 0


def _peers(decoder: nn.Module, experts: distributed.ProcessGroup | None) -> distributed.ProcessGroup | None:
    """Return the ranks of expert parallelism, to exchange shapes of packs; None where all have the same packs."""
    layers = shared_group(decoder)
    if experts is None or (layers is not None and has_ranks(layers, experts)):
        return None
    return new_group(distributed.get_process_group_ranks(experts), "gloo")


def without_exchanges(decoder: nn.Module, experts: distributed.ProcessGroup | None = None) -> Isolated:
    """Return a context in which a decoder's layers exchange nothing; see `without_collectives`."""
    together = () if experts is None else (experts, shared_group(decoder, experts))
    return without_collectives(*sharing_groups(decoder), *levels(decoder), *together)


def _without_capture(old: Callable[..., Any]) -> Callable[..., Any]:
    """Let a step of a model that takes images, whose layers are on graphs, run as it is."""

    @functools.wraps(old)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        models = holders(kwargs.get("model", ()))
        if any(Facts(model=getattr(each, "config", None)).rows for each in models):
            return self.forward_backward_func(*args, **kwargs)
        return old(self, *args, **kwargs)

    return __call__


PATCHES = (Patch(seam("full_iteration"), _without_capture),)
