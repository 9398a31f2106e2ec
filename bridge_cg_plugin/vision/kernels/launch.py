"""Launching Triton kernels, or compiling them for launches to come."""

from typing import Any

from triton.runtime.jit import KernelInterface


def launch(kernel: KernelInterface[Any], grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
    """Launch a kernel; where its first argument is a meta tensor, compile and load it for arguments like these.

    Args:
        kernel: The kernel.
        grid: Programs in each dimension.
        arguments: Of the kernel, a tensor first.
        settings: Constants of the kernel and options of its compiler.
    """
    if arguments[0].is_meta:
        _ = kernel.warmup(*arguments, grid=grid, **settings).run  # reading it loads it
    else:
        kernel[grid](*arguments, **settings)
