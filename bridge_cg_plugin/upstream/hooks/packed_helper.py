"""The helper that Bridge's train loop drives for the language model, where packed-sequence graphs are asked for."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import distributed, nn

from ...graphs.recordings.executor import Executor, Isolated
from ...language.packed.workload import PackedWorkload, ShapeExchange
from ...options import GraphOptions, check_options, packed_options
from ...options.declaration import plain
from ...options.normalization import options_of
from ...options.sources import collect
from ..decoder.block import TransformerBlockFamily
from ..decoder.layers import levels
from ..environment import check_process
from ..host_batch import PACK_OFFSETS
from ..parallel.pipelines import microbatches_in_flight
from ..parallel.process_groups import (
    consensus_of,
    expert_group,
    has_ranks,
    new_group,
    shared_group,
    sharing_groups,
    without_collectives,
)
from ..random_states import random_states
from ..seams.patches import Patch
from ..seams.registry import seam
from ..wrappers import unwrapped
from .graph_helper import GraphHelper, default_executor, graphs_over, release_module


class PackedCudaGraphHelper:
    """Packed-sequence graphs behind the interface of megatron-core's `TECudaGraphHelper`, one helper per model chunk.

    Args:
        model: The training loop's model chunks.
        config: The language model's transformer config.
        seq_length: Unused: warm-up steps show how long packs are.
        micro_batch_size: Unused: a pack is one row.
        optimizers: Unused, for the interface.
        pg_collection: Unused, for the interface.
        num_microbatches: Microbatches of a step; megatron-core may run more.
        options: Options, checked; None reads and checks those of the config.
        executor: Makes recordings; None takes CUDA graphs on a GPU.
        releasable: Whether memory of graphs may leave the device between steps.

    Raises:
        OptionError: An option cannot work with this model.
    """

    def __init__(
        self,
        model: Sequence[nn.Module],
        config: Any,
        seq_length: int = 0,
        micro_batch_size: int = 1,
        optimizers: Sequence[Any] = (),
        pg_collection: Any = None,
        *,
        num_microbatches: int = 1,
        options: GraphOptions | None = None,
        executor: Executor | None = None,
        releasable: bool = False,
    ) -> None:
        options = options or checked_options(config)
        check_process()
        in_flight = partial(microbatches_in_flight, config, num_microbatches)
        self.chunks = [
            DecoderHelper(decoder, options, model, in_flight, executor, releasable) for decoder in find_decoders(model)
        ]

    def create_cudagraphs(self) -> None:
        """Capture; on failure a decoder goes on eager unless the options say strict."""
        for chunk in self.chunks:
            chunk.create_cudagraphs()

    def graphs_created(self) -> bool:
        """Whether graphs exist."""
        return any(chunk.graphs_created() for chunk in self.chunks)

    def cuda_graph_set_manual_hooks(self) -> None:
        """Nothing to set: every replay waits for the parameters itself."""

    def delete_cuda_graphs(self) -> None:
        """Report and drop the graphs, if there are any; the decoders get their own forward back."""
        for chunk in self.chunks:
            chunk.delete_cuda_graphs()


class DecoderHelper(GraphHelper):
    """One decoder's packed-sequence graphs.

    Args:
        decoder: The decoder.
        options: What the user asked for.
        chunks: The training loop's model chunks.
        in_flight: Counts the microbatches in flight.
        executor: Makes recordings; None takes CUDA graphs on a GPU.
        releasable: Whether memory of graphs may leave the device between steps.
    """

    def __init__(
        self,
        decoder: nn.Module,
        options: GraphOptions,
        chunks: Sequence[nn.Module],
        in_flight: Callable[[], int],
        executor: Executor | None,
        releasable: bool,
    ) -> None:
        release_module(decoder)
        packed, modules = options.packed, plain(options.language_model.modules)
        family = TransformerBlockFamily(decoder)
        family.parts(modules)  # what cannot be recorded is refused before a step is trained
        experts = None if family.exchange is None else expert_group(decoder)
        consensus = consensus_of(shared_group(decoder, experts))
        graphs = graphs_over(
            chunks,
            decoder,
            PackedWorkload(packed, modules, family, PACK_OFFSETS, _shape_exchange(decoder, experts)),
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
        self._take(graphs, packed.slots, in_flight)


def checked_options(config: Any) -> GraphOptions:
    """Return the options that a model's config holds.

    Raises:
        OptionError: They cannot work.
    """
    written = collect(config)
    options = options_of(written)
    check_options(options, written.facts)
    return options


def find_decoders(chunks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the language-model decoder of every chunk that has layers, under any wrapper."""
    return [decoder for chunk in chunks if (decoder := next(_decoders(chunk), None)) is not None]


def _decoders(chunk: nn.Module) -> Iterator[nn.Module]:
    for module in unwrapped(chunk):
        for holder in (getattr(module, "language_model", None), module):
            decoder = getattr(holder, "decoder", None)
            if isinstance(decoder, nn.Module) and len(getattr(decoder, "layers", ())):
                yield decoder


def _shape_exchange(decoder: nn.Module, experts: distributed.ProcessGroup | None) -> ShapeExchange | None:
    """Return the exchange of shapes between ranks of expert parallelism; None where all have the same packs."""
    layers = shared_group(decoder)
    if experts is None or (layers is not None and has_ranks(layers, experts)):
        return None
    return ShapeExchange(new_group(distributed.get_process_group_ranks(experts), "gloo"))


def without_exchanges(decoder: nn.Module, experts: distributed.ProcessGroup | None = None) -> Isolated:
    """Return a context in which a decoder's layers exchange nothing; see `without_collectives`."""
    return without_collectives(*sharing_groups(decoder), *levels(decoder), *([] if experts is None else [experts]))


def _for_packs(old: type) -> type:
    """Return megatron-core's helper class, which makes the plugin's helper where packed-sequence graphs are on."""

    class TECudaGraphHelper(old):
        def __new__(cls, model: Sequence[nn.Module], config: Any, *args: Any, **kwargs: Any) -> Any:
            if packed_options(config).enabled:
                return PackedCudaGraphHelper(model, config, *args, **kwargs)
            return super().__new__(cls)

    TECudaGraphHelper.__qualname__ = old.__qualname__
    TECudaGraphHelper.__module__, TECudaGraphHelper.__doc__ = old.__module__, old.__doc__
    return TECudaGraphHelper


PATCHES = (Patch(seam("packed_helper"), _for_packs),)
