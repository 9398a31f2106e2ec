"""What recording needs of Transformer Engine's modules."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...graphs.modules import every_module
from ...graphs.recordings.parameters import sum_of
from ...upstream_types import UpstreamModule
from ..attributes import overridden
from ..seams.registry.engine import TE_ATTENTION, TE_LAYERNORM_LINEAR, TE_LINEAR


def forget_attention_selection() -> None:
    """Drop Transformer Engine's cached choice of attention kernel if comparing with it would read the device.

    Bridge's eager vision forward passes `max_seqlen` as a device tensor, and the cache keeps it. A recorded forward
    with the same value would compare against it, which waits for the device and ends a capture.
    """
    module = sys.modules.get(TE_ATTENTION)
    cache: Any = getattr(module, "_attention_backends", None)
    cached = cache.get("attention_params") if isinstance(cache, dict) else None
    if cached is not None and any(isinstance(value, Tensor) for value in vars(cached).values()):
        cache["attention_params"] = None


def accumulate_from_now_on(modules: Sequence[nn.Module]) -> None:
    """Let an eager microbatch add its weight gradients, also if it is the first one that modules see in a step.

    Where the weight-gradient GEMM writes to `main_grad` itself, a step's first microbatch overwrites what is there:
    zeros, or what replays of earlier microbatches added without the modules' knowing. megatron-core marks first
    microbatches in all modules of a model that computes in fp8, which the vision encoder itself never does.
    """
    for module in every_module(modules):
        marked: UpstreamModule = module
        if getattr(marked, "is_first_microbatch", False):
            marked.is_first_microbatch = False


@contextmanager
def accumulating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let linear modules that add weight gradients to `main_grad` inside their GEMM never overwrite it instead.

    A first microbatch does; a recording serves every microbatch.
    """
    with _small_placeholders(), ExitStack() as stack:
        for module in every_module(modules):
            if getattr(module, "fuse_wgrad_accumulation", False) and hasattr(module, "is_first_microbatch"):
                stack.enter_context(overridden(module, "is_first_microbatch", False))
        yield


@contextmanager
def fused_accumulation(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let linear modules add weight gradients to `main_grad` inside their GEMM while a region is recorded.

    The sum keeps the fp32 product that a separate addition first rounds to the weight's dtype. What was set before
    comes back.
    """
    with ExitStack() as stack:
        for module in every_module(modules):
            weight = module._parameters.get("weight")
            fusable = hasattr(module, "fuse_wgrad_accumulation") and weight is not None and weight.requires_grad
            if fusable and sum_of(weight) is not None:
                stack.enter_context(overridden(module, "fuse_wgrad_accumulation", True))
        stack.enter_context(accumulating(modules))
        yield


@contextmanager
def _small_placeholders() -> Iterator[None]:
    """Let autograd get one element, expanded, for a weight's gradient that a GEMM has added to `main_grad`.

    Transformer Engine's placeholders are as large as the weights, one for each shape, and stay for good.
    """
    with in_linear_modules("get_dummy_wgrad", lambda original: _placeholder):
        yield


@contextmanager
def in_linear_modules(name: str, made: Callable[[Any], Any]) -> Iterator[None]:
    """Let Transformer Engine's linear modules, where they are imported, call what is made of a function of theirs."""
    with ExitStack() as stack:
        for owner in filter(None, map(sys.modules.get, (TE_LINEAR, TE_LAYERNORM_LINEAR))):
            stack.enter_context(overridden(owner, name, made(getattr(owner, name))))
        yield


def _placeholder(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Stand in for Transformer Engine's `get_dummy_wgrad`: what nobody reads, or zeros."""
    make = torch.zeros if zero else torch.empty
    return make((1,) * len(shape), dtype=dtype, device="cuda").expand(*shape)
