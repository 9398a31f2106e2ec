"""megatron-core's recompute of activations inside recorded work.

A recorded backward runs the same layers again, where upstream's settings say so. Upstream's own function can only be
differentiated by `backward()`, which adds to `.grad`; PyTorch's computes the same in any backward.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from ...graphs.errors import CaptureError
from ..random_states import ATTENTION, HIDDEN, draws
from ..seams.registry import seam
from ..wrappers import overridden

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
