"""Memory that leaves in part: a block of the driver's is one piece, so what is to stay moves to smaller ones."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from .virtual_memory import VirtualMemory


def divide(
    driver: VirtualMemory, address: int, nbytes: int, handle: int, parts: Sequence[tuple[int, int]]
) -> list[int]:
    """Put memory of its own, with the same content, behind parts of a block; the block is behind nothing then.

    Args:
        driver: What makes memory.
        address, nbytes, handle: The block; no work of the device uses it.
        parts: First address and size of each.

    Returns:
        The handle of each part's memory.

    Raises:
        NoDeviceMemory: There is not enough for the parts beside the block; all is as before.
        DeviceMemoryError: The driver failed; all is as before.
    """
    with ExitStack() as undo:
        handles = []
        for part in parts:
            handles.append(_copy(driver, *part))
            undo.callback(driver.destroy, handles[-1])
        driver.unmap(address, nbytes)
        undo.callback(driver.map, address, nbytes, handle)
        for (first, size), made in zip(parts, handles, strict=True):
            driver.map(first, size, made)
            undo.callback(driver.unmap, first, size)
        undo.pop_all()
    return handles


def _copy(driver: VirtualMemory, address: int, nbytes: int) -> int:
    """Return the handle of new memory with the content of other memory."""
    with ExitStack() as undo:
        handle = driver.create(nbytes)
        undo.callback(driver.destroy, handle)
        with _elsewhere(driver, handle, nbytes) as place:
            driver.copy(place, address, nbytes)
        undo.pop_all()
    return handle


@contextmanager
def _elsewhere(driver: VirtualMemory, handle: int, nbytes: int) -> Iterator[int]:
    """Put memory behind addresses that are there inside only; yields the first one."""
    address = driver.reserve(nbytes)
    try:
        driver.map(address, nbytes, handle)
        try:
            yield address
        finally:
            driver.unmap(address, nbytes)
    finally:
        driver.free(address, nbytes)
