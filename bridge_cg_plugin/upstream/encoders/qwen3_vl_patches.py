"""Patches of Bridge's Qwen3-VL: its vision model never pads, and gradients of deepstack features are summed.

Under sequence parallelism every rank has a part of the tokens. Bridge cuts the features of images accordingly, by a
slice of what every rank computed in full. The gradient of a slice is zero for the rows of other ranks, so each rank
trains the encoder with a part of the gradient. The sum over tensor-parallel ranks is put between the encoder and the
slice, which is outside all graphs, of the encoder and of the language model.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...options.normalization import ALLREDUCE
from ...options.values import is_unset, parse_flag
from ..seams.patches import Patch
from ..seams.registry import seam
from ..wrappers import overridden

PADDING_SWITCH = seam("vision_padding_switch").target.rpartition(".")[2]
_ONE_THREAD = Lock()


def _never_pads(old: Callable[..., Any]) -> Callable[..., Any]:
    """Upstream's own padding and masking for graphs drops the attention boundaries: forward never takes that path."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _not_padding(self):
            return old(self, *args, **kwargs)

    return forward


class _No:
    """Answers the model's question whether to pad, for all its passes that are under way in some thread."""

    passes = 0

    def __call__(self) -> bool:
        return False


@contextmanager
def _not_padding(model: Any) -> Iterator[None]:
    with _ONE_THREAD:
        no = vars(model).setdefault(PADDING_SWITCH, _No())
        no.passes += 1
    try:
        yield
    finally:
        with _ONE_THREAD:
            no.passes -= 1
            if not no.passes:
                del vars(model)[PADDING_SWITCH]


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
        if not (_wanted(self.config) and self.config.sequence_parallel):
            return old(self, *args, **kwargs)
        owner = sys.modules[SPLIT.module]
        split = _with_sums(getattr(owner, SPLIT.target), self.pg_collection.tp)
        with overridden(owner, SPLIT.target, split):
            return old(self, *args, **kwargs)

    return forward


def _wanted(config: Any) -> bool:
    value = getattr(config, ALLREDUCE, None)
    return not is_unset(value) and parse_flag(ALLREDUCE, value)


def _with_sums(split: Callable[..., Any], group: Any) -> Callable[..., Any]:
    @functools.wraps(split)
    def split_deepstack_embs(visual_pos_masks: Any, deepstack_visual_embeds: Any, *args: Any, **kwargs: Any) -> Any:
        if deepstack_visual_embeds is not None:
            deepstack_visual_embeds = [_SumOfGradients.apply(features, group) for features in deepstack_visual_embeds]
        return split(visual_pos_masks, deepstack_visual_embeds, *args, **kwargs)

    return split_deepstack_embs


PATCHES = (Patch(seam("vision_padding"), _never_pads), Patch(FORWARD, _summing))
