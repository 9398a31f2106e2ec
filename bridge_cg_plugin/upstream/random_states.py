"""Random states that recorded work may draw from."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..graphs.errors import CaptureError
from ..graphs.instance import every_module
from .wrappers import overridden

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
