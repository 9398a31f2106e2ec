"""Patches of Bridge's Qwen3-VL, where it or its graphs would compute something else, or could not be built.

* Padding: upstream pads the vision model for graphs and drops the boundaries of attention. It never pads here.
* Deepstack: under sequence parallelism Bridge slices features of images that every rank computed in full. A slice's
  gradient is zero for other ranks' rows, so each rank trains the encoder with a part of the gradient. The sum over
  tensor-parallel ranks is put between the encoder and the slice, outside all graphs.
* Rotation: Transformer Engine replays the arguments it captured and drops others without a word. megatron-core captures
  `rotary_pos_emb` for position embedding "rope" only, so layers with "mrope" would be captured without rotation.
* Varying lengths: upstream refuses models of loops that say so, as verl does, beside any graphs of the language model.
  Packed graphs take packs of any length.
* Virtual stages: Qwen3-VL's providers do not pass theirs to the model, without which megatron-core numbers no layers:
  no interleaved pipeline can be built. Qwen3.5-VL's pass it on.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...options.declaration import is_unset, parse_flag
from ...options.graph_options import asks_for_packed_graphs
from ...options.normalization import ALLREDUCE
from ..seams.patches import Patch, arguments_of
from ..seams.registry import seam
from ..seams.registry.bridge import DROPS_STAGE, MODEL_OF_PROVIDER
from ..seams.seam import Seam
from ..wrappers import overridden


def _never_pads(old: Callable[..., bool]) -> Callable[..., bool]:
    """Upstream's own padding and masking for graphs drops the attention boundaries: forward never takes that path."""

    def _uses_vision_cuda_graph(self: Any) -> bool:
        return False

    return _uses_vision_cuda_graph


FORWARD, SPLIT = seam("deepstack_forward"), seam("deepstack_split")


class _SumOfGradients(torch.autograd.Function):
    """The identity; its backward sums the gradient over the ranks of a group, in the gradient's dtype.

    A row's gradient comes from one rank and is zero on all others, so the sum is exact in any dtype.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return features.view_as(features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


def _summing(old: Callable[..., Any]) -> Callable[..., Any]:
    """Let a model whose configuration has the option split features whose gradients are summed."""

    @functools.wraps(old)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = getattr(self.config, ALLREDUCE, None)
        if is_unset(value) or not parse_flag(ALLREDUCE, value) or not self.config.sequence_parallel:
            return old(self, *args, **kwargs)
        owner = sys.modules[SPLIT.module]
        split = _with_sums(getattr(owner, SPLIT.target), self.pg_collection.tp)
        with overridden(owner, SPLIT.target, split):
            return old(self, *args, **kwargs)

    return forward


def _with_sums(split: Callable[..., Any], group: Any) -> Callable[..., Any]:
    @functools.wraps(split)
    def split_deepstack_embs(visual_pos_masks: Any, deepstack_visual_embeds: Any, *args: Any, **kwargs: Any) -> Any:
        if deepstack_visual_embeds is not None:
            deepstack_visual_embeds = [_SumOfGradients.apply(features, group) for features in deepstack_visual_embeds]
        return split(visual_pos_masks, deepstack_visual_embeds, *args, **kwargs)

    return split_deepstack_embs


def _with_rotary(old: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(old)
    def get_layer_static_inputs(self: Any, seq_length: int, micro_batch_size: int) -> dict[str, Any]:
        inputs, config = old(self, seq_length, micro_batch_size), self.config
        captures_attention = "attention_mask" in inputs
        if captures_attention and getattr(config, "position_embedding_type", None) == "mrope":
            size = int(config.kv_channels * min(1.0, getattr(config, "rotary_percent", 1.0)))
            shape = (seq_length // config.context_parallel_size, micro_batch_size, 1, size)
            # A new one on every call: upstream decides which captures may share it.
            inputs["rotary_pos_emb"] = torch.zeros(shape, dtype=torch.float32, device=inputs["hidden_states"].device)
        return inputs

    return get_layer_static_inputs


def _with_packed_graphs(old: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(old)
    def expose(self: Any) -> None:
        config = getattr(self.language_model, "config", None)
        if not asks_for_packed_graphs(config):
            return old(self)
        with overridden(config, "variable_seq_lengths", False):
            return old(self)

    return expose


STAGE, STAGES = "vp_stage", tuple(seam(f"{model.provider}.provide") for model in DROPS_STAGE)


def _tells_stage(entry: Seam) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes a module's `provide` build the model of the virtual stage that it was asked for."""

    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        argument = arguments_of(entry, old)

        @functools.wraps(old)
        def provide(*args: Any, **kwargs: Any) -> Any:
            stage = argument(STAGE, args, kwargs)
            if stage is None:
                return old(*args, **kwargs)
            owner = sys.modules[entry.module]
            model = getattr(owner, MODEL_OF_PROVIDER)
            with overridden(owner, MODEL_OF_PROVIDER, functools.partial(model, **{STAGE: stage})):
                return old(*args, **kwargs)

        return provide

    return make


PATCHES = (
    Patch(seam("vision_padding"), _never_pads),
    Patch(FORWARD, _summing),
    Patch(seam("language_model_rotary"), _with_rotary),
    Patch(seam("variable_lengths"), _with_packed_graphs),
    *(Patch(entry, _tells_stage(entry)) for entry in STAGES),
)
