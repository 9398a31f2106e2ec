"""Named ranges in profiles: in PyTorch's profiler, and in Nsight Systems as NVTX."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

# Nsight Systems sets it in the processes that it starts.
UNDER_NSIGHT = "NSYS_PROFILING_SESSION_ID" in os.environ
# Also true inside `emit_nvtx`, which Bridge enters with `profiling.use_nsys_profiler`.
_profiler_is_on = torch._C._autograd._profiler_enabled


def _profiled() -> bool:
    return UNDER_NSIGHT or _profiler_is_on()


# Whether the training step under way is profiled: replays read it, since even one call for each would cost.
on = UNDER_NSIGHT


def look() -> None:
    """Note whether there is a profile, at the beginning of a training step."""
    global on
    on = _profiled()


def named_range(name: str) -> AbstractContextManager[None]:
    """Return a range of this name in the profile that is under way; without one, a context that does nothing."""
    return _range(f"bridge-cg {name}") if _profiled() else nullcontext()


@contextmanager
def _range(name: str) -> Iterator[None]:
    if _profiler_is_on():
        with torch.profiler.record_function(name):
            yield
        return
    nvtx = torch.cuda.is_available()  # else PyTorch may come without NVTX
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        if nvtx:
            torch.cuda.nvtx.range_pop()
