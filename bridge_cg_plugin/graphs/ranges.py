"""Named ranges in profiles: in PyTorch's profiler, and in Nsight Systems as NVTX."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# Nsight Systems sets it in the processes that it starts.
UNDER_NSIGHT = "NSYS_PROFILING_SESSION_ID" in os.environ
# Also true inside `emit_nvtx`, which Bridge enters with `profiling.use_nsys_profiler`.
_profiler_is_on = torch._C._autograd._profiler_enabled

# Whether the training step under way is profiled: replays read it, since even one call for each would cost.
on = UNDER_NSIGHT


def look() -> None:
    """Note whether there is a profile, at the beginning of a training step."""
    global on
    on = UNDER_NSIGHT or _profiler_is_on()


def named_range(name: str) -> AbstractContextManager[Any]:
    """Return a range of this name in the profile that is under way; without one, a context that does nothing."""
    name = f"bridge-cg {name}"
    if _profiler_is_on():
        return torch.profiler.record_function(name)
    # Without a GPU, PyTorch may come without NVTX.
    return torch.cuda.nvtx.range(name) if UNDER_NSIGHT and torch.cuda.is_available() else nullcontext()
