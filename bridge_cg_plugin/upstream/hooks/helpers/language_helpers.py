"""The helpers of graphs of packs and of a whole language model, behind megatron-core's interface.

Bridge's train loop makes and drives that of packs like megatron-core's class of the name. Its step of a model that
takes images reads sizes on the host, and megatron-core's full_iteration makes no images static: there the step runs as
it is, under any schedule, and the language model inside it, from embeddings to losses, replays a graph of its forward
and one of its backward in every microbatch.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, distributed, nn

from ....graphs.manager import GraphManager
from ....graphs.recordings.executor import Executor, Isolated
from ....language.packed.workload import PackedWorkload, ShapeExchange
from ....language.whole_model import LanguageModelWorkload
from ....options import GraphOptions, check_options, packed_options
from ....options.declaration import plain
from ....options.normalization import options_of
from ....options.sources import collect
from ....upstream_types import UpstreamModule
from ...decoder.block import TransformerBlockFamily
from ...decoder.layers import levels, refuse_statistics
from ...environment import check_process
from ...kernels.layers import fused_head_norms, kernels_available
from ...kernels.recompute import random_states
from ...kernels.rotary import fused_rotary
from ...kernels.transformer_engine import device_lengths, forget_attention_selection, fused_accumulation
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
from ...seams.activation import before_deactivation
from ...seams.patches import Patch
from ...seams.registry import seam
from ...wrappers import chunks_of, holders, overridden, unwrapped
from ..batches import PACK_OFFSETS
from .graph_helper import GraphHelper, active_graphs, default_executor, graphs_over, release_module


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
        self.chunks: list[GraphHelper] = []
        for decoder in find_decoders(model):
            self.chunks.append(GraphHelper())
            graphs = _decoder_graphs(decoder, options, model, executor, releasable)
            self.chunks[-1].take(graphs, options.packed.slots, in_flight)

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


def _decoder_graphs(
    decoder: nn.Module, options: GraphOptions, chunks: Sequence[nn.Module], executor: Executor | None, releasable: bool
) -> GraphManager:
    """Return packed-sequence graphs of one decoder; arguments as for `PackedCudaGraphHelper`."""
    release_module(decoder)
    packed, modules = options.packed, plain(options.language_model.modules)
    family = TransformerBlockFamily(decoder)
    family.parts(modules)  # what cannot be recorded is refused before a step is trained
    experts = None if family.exchange is None else expert_group(decoder)
    consensus = consensus_of(shared_group(decoder, experts))
    return graphs_over(
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


DEEPSTACK = seam("deepstack_addition").target.rpartition(".")[2]


class CurrentGraphs(GraphHelper):
    """The graphs of the language model that is trained in this process."""

    workload: LanguageModelWorkload

    def step(
        self, chunks: Sequence[nn.Module], model: UpstreamModule, warmup_steps: int, microbatches: int, training: bool
    ) -> AbstractContextManager[None]:
        """Return what a step of a model that takes images, or an evaluation's, runs in.

        Graphs belong to training: its first step makes them, and an evaluation uses what is there.
        """
        language_model = model.language_model
        if self.graphs is None or self.graphs.model is not language_model:
            if not training:
                return nullcontext()
            self.delete_cuda_graphs()  # left behind by a run that ended with an error
            check_process()
            deepstack = len(model.vision_model.config.deepstack_visual_indexes)
            self.workload = LanguageModelWorkload(language_model, deepstack, recording, not sharing_groups(model))
            executor = default_executor(random_states, shared=tensor_group(model) is not None)
            self.graphs = graphs_over(chunks, language_model, self.workload, executor)
        if not training:
            return nullcontext()
        if self.workload.observed and self.is_due(warmup_steps):
            self.graphs.capture()
        return self.workload.training_step(microbatches)


CURRENT = CurrentGraphs()
before_deactivation(CURRENT.delete_cuda_graphs)


def all_graphs() -> list[GraphManager]:
    """Return the graphs of this process's modules, those of a whole language model last."""
    return active_graphs() + ([CURRENT.graphs] if CURRENT.graphs is not None else [])


def find_model(chunks: nn.Module | Sequence[nn.Module]) -> nn.Module | None:
    """Return the model, under any wrapper, that holds Qwen3-VL's vision model and a language model; None without."""
    for model in holders(chunks):
        vision, language = (getattr(model, part, None) for part in ("vision_model", "language_model"))
        if hasattr(getattr(vision, "config", None), "deepstack_visual_indexes") and isinstance(language, nn.Module):
            return model
    return None


@contextmanager
def recording(language_model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let upstream's modules run inside a graph: no device reads, features of images as dense tensors.

    Raises:
        CaptureError: Somebody reads statistics that a replay does not leave.
    """
    refuse_statistics(modules)
    forget_attention_selection()
    with ExitStack() as stack:
        stack.enter_context(overridden(language_model.decoder, DEEPSTACK, _add_dense))
        stack.enter_context(fused_accumulation(modules))
        stack.enter_context(device_lengths())
        if kernels_available():
            stack.enter_context(fused_rotary(modules))
            stack.enter_context(fused_head_norms(modules))
        yield


def _add_dense(hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor) -> Tensor:
    """Add features, zero where no image is: what indexing by a mask does, without a shape that depends on data."""
    return hidden_states + visual_embeds


def _of_the_language_model(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(old)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        chunks = chunks_of(kwargs.get("model", ()))
        model = find_model(chunks)
        if model is None:
            return old(self, *args, **kwargs)
        microbatches, training = kwargs["num_microbatches"], not kwargs["forward_only"]
        with CURRENT.step(chunks, model, self.cuda_graph_warmup_steps, microbatches, training):
            return self.forward_backward_func(*args, **kwargs)

    return __call__


PATCHES = (Patch(seam("packed_helper"), _for_packs), Patch(seam("full_iteration"), _of_the_language_model))
