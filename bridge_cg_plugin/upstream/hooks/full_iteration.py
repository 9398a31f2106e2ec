"""`cuda_graph_impl=full_iteration` on a model that takes images: its language model on graphs, everything else eager.

megatron-core's wrapper captures a whole step in one graph. Bridge's step of such a model reads sizes on the host, and
images are not among the tensors that the wrapper makes static. So here the step runs as it is, under any schedule, and
the language model inside it, from embeddings to losses, replays a graph of its forward and one of its backward in every
microbatch.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from ...graphs.manager import GraphManager
from ...language.whole_model.workload import LanguageModelWorkload
from ...upstream_types import UpstreamModule
from ..decoder.layers import refuse_statistics
from ..environment import check_process
from ..kernels.layers import fused_head_norms, kernels_available
from ..kernels.rotary import fused_rotary
from ..kernels.transformer_engine import device_lengths, forget_attention_selection, fused_accumulation
from ..parallel.process_groups import sharing_groups, tensor_group
from ..random_states import random_states
from ..seams.activation import before_deactivation
from ..seams.patches import Patch
from ..seams.registry import seam
from ..wrappers import chunks_of, holders, overridden
from .graph_helper import GraphHelper, active_graphs, default_executor, graphs_over

WRAPPER_PATCH = "full_iteration"
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
        if self.workload.warmup_microbatches() and self.is_due(warmup_steps):
            self.graphs.capture()
        may_record = not any(graphs.recorded for graphs in active_graphs())
        return self.workload.training_step(microbatches, may_record)


CURRENT = CurrentGraphs()
before_deactivation(CURRENT.delete_cuda_graphs)


def all_graphs() -> list[GraphManager]:
    """Return the graphs of this process's modules, those of a whole language model last."""
    return active_graphs() + ([CURRENT.graphs] if CURRENT.graphs is not None else [])


def find_model(chunks: nn.Module | Sequence[nn.Module]) -> nn.Module | None:
    """Return the model, under any wrapper, that holds Qwen3-VL's vision model and a language model; None without."""
    return next((m for m in holders(chunks) if _is_qwen3_vl(m)), None)


def _is_qwen3_vl(model: nn.Module) -> bool:
    vision, language = (getattr(model, part, None) for part in ("vision_model", "language_model"))
    return hasattr(getattr(vision, "config", None), "deepstack_visual_indexes") and isinstance(language, nn.Module)


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


PATCHES = (Patch(seam(WRAPPER_PATCH), _of_the_language_model),)
