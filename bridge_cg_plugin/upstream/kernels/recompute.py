"""megatron-core's recompute of activations inside recorded work.

A recorded backward runs the same layers again, where upstream's settings say so. Upstream's own function can only be
differentiated by `backward()`, which adds to `.grad`; PyTorch's computes the same in any backward.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...graphs.errors import CaptureError
from ...graphs.instance import every_module
from ..seams.registry import seam
from ..wrappers import overridden

# Attention draws below a fork of its own, other dropout where a decoder forks around its layers.
ATTENTION, HIDDEN = "attention_dropout", "hidden_dropout"


def random_states() -> tuple[torch.Generator, ...]:
    """Return the generators of megatron-core's tracker.

    Dropout draws from them, and under sequence parallelism they stand in for the default generator in a decoder's
    layers, where attention asks for its state without dropout, too.
    """
    return tuple(state for state in _states().values() if isinstance(state, torch.Generator))


@contextmanager
def usable_random_states(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Leave out forks of random states that a graph cannot use while these modules are recorded.

    A fork below which nothing is drawn changes nothing. A loop may have made such states before it built a model.

    Raises:
        CaptureError: A module draws from them.
    """
    if all(isinstance(state, torch.Generator) for state in _states().values()):
        yield
        return
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    if draws(modules, ATTENTION):
        raise _refusal(ATTENTION)

    def fork(name: str = "") -> AbstractContextManager[None]:
        if draws(modules, HIDDEN):
            raise _refusal(HIDDEN)
        return nullcontext()

    with overridden(get_cuda_rng_tracker(), "fork", fork):
        yield


def _states() -> Mapping[str, Any]:
    """Return the tracker's states by name; none before somebody has made a tracker."""
    from megatron.core.tensor_parallel.random import get_all_rng_states

    try:
        return get_all_rng_states() or {}
    except AssertionError:
        return {}


def draws(modules: Sequence[nn.Module], option: str) -> bool:
    """Whether one of these modules has dropout by an option of its configuration."""
    configs = (getattr(module, "config", None) for module in every_module(modules) if module.training)
    return any(getattr(config, option, None) for config in configs)


def _refusal(option: str) -> CaptureError:
    return CaptureError(
        f"{option} draws from random states that a graph cannot use: seed them by "
        "model_parallel_cuda_manual_seed(seed, te_rng_tracker=True) before the model is built, or set it to 0"
    )


# Where upstream's modules look it up.
RECOMPUTE = seam("recompute")
PACKAGE = RECOMPUTE.module.rpartition(".")[0]


@contextmanager
def recomputing(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let these modules keep the inputs of what they recompute, and run it again in a recorded backward.

    Where somebody else's function is in the place of upstream's, it stays.
    """
    package = importlib.import_module(PACKAGE)
    code = getattr(getattr(package, RECOMPUTE.target), "__code__", None)
    # Where code lies proves whose it is; no look compares it, which other threads would see replaced.
    if code is None or code.co_filename != importlib.import_module(RECOMPUTE.module).__file__:
        yield
        return
    with overridden(package, RECOMPUTE.target, partial(_recomputed, modules)):
        yield


def _recomputed(
    modules: Sequence[nn.Module], function: Callable[..., Any], distribute_saved_activations: bool, *args: Any
) -> Any:
    """Stand in for upstream's `checkpoint`; inputs are not divided among ranks, which changes no value."""
    if dropout := next((name for name in (ATTENTION, HIDDEN) if draws(modules, name)), None):
        raise CaptureError(
            f"recompute inside a graph would draw other random numbers than its forward: set {dropout} to 0, or "
            "recompute nothing"
        )
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
