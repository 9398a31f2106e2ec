"""Launching Triton kernels, or compiling them for launches to come."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.runtime.jit import KernelInterface

from ...graphs.errors import CaptureError, named

_deferring = threading.local()


@dataclass(frozen=True, slots=True)
class KernelCompilation:
    """Compiles and loads a kernel when called, in any thread. Equal ones compile for the same.

    Attributes:
        kernel: The kernel.
        key: What the kernel is compiled for.
        arguments: Of the kernel; tensors are on the meta device.
        settings: Constants of the kernel and options of its compiler.
    """

    kernel: KernelInterface[Any]
    key: tuple[Any, ...]
    arguments: tuple[Any, ...] = field(compare=False)
    settings: dict[str, Any] = field(compare=False)

    def __call__(self) -> None:
        """Compile the kernel, unless Triton has it in one of its caches, and load it."""
        _ = self.kernel.warmup(*self.arguments, grid=(1,), **self.settings).run  # reading it loads it


def launch(kernel: KernelInterface[Any], grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
    """Launch a kernel; where its first argument is a meta tensor, compile and load it for arguments like these.

    Args:
        kernel: The kernel.
        grid: Programs in each dimension.
        arguments: Of the kernel, a tensor first.
        settings: Constants of the kernel and options of its compiler.
    """
    if arguments[0].is_meta:
        kinds = (each.dtype if isinstance(each, torch.Tensor) else each for each in arguments)
        defer(KernelCompilation(kernel, (*kinds, *settings.items()), arguments, settings))
    else:
        kernel[grid](*arguments, **settings)


def defer(work: Callable[[], None]) -> None:
    """Do some work, or inside `deferred` leave it to the caller."""
    found: list[Callable[[], None]] | None = getattr(_deferring, "found", None)
    if found is None:
        work()
    else:
        found.append(work)


@contextmanager
def deferred() -> Iterator[list[Callable[[], None]]]:
    """Find out inside what this thread's launches with meta tensors would compile, without compiling it."""
    found: list[Callable[[], None]] = []
    _deferring.found = found
    try:
        yield found
    finally:
        del _deferring.found


def refuse_capture(what: str) -> None:
    """Refuse what must come before a capture.

    Args:
        what: What would be done.

    Raises:
        CaptureError: A capture is under way.
    """
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(f"{what} for the first time inside a capture")


def tried(what: str, check: Callable[[], str]) -> str:
    """Return why something cannot be used, nothing where it can.

    Args:
        what: Its name.
        check: Tries it; returns the reason, or raises it.

    Raises:
        CaptureError: A capture is under way.
    """
    refuse_capture(f"{what} would be tried")
    try:
        return check()
    except Exception as error:  # of a compiler: anything
        return named(error)
