"""Copies between device and host, ordered by events that are part of a capture."""

from typing import Any, Protocol

import torch
from torch import Tensor


class Transfers(Protocol):
    """Copies bytes to the host and back beside the main work."""

    def begin(self) -> None:
        """Take the current stream as the main work's."""

    def offload(self, source: Tensor, host: Tensor) -> Any:
        """Begin to copy `[bytes]` uint8 to the host, once the main work has come here; returns what to wait for."""

    def load(self, host: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy bytes to fresh device memory; returns them and what to wait for."""

    def wait(self, token: Any) -> None:
        """Let the main work wait for a copy."""


class CudaTransfers:
    """Copies on a stream of their own that forks from the main one and joins it, by events.

    Memory is taken and given back by the main stream alone: a source is given back behind its wait, and what is fetched
    goes to memory whose last use lies before the fork. So PyTorch's allocator may reuse both at once, in a capture too,
    where `record_stream` could not hold memory back.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._main = torch.cuda.current_stream(device)

    def begin(self) -> None:
        """See `Transfers`."""
        self._main = torch.cuda.current_stream(self._device)

    def offload(self, source: Tensor, host: Tensor) -> torch.cuda.Event:
        """See `Transfers`."""
        return self._copy(host, source)

    def load(self, host: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """See `Transfers`."""
        with torch.cuda.stream(self._main):
            tensor = torch.empty(host.numel(), dtype=torch.uint8, device=self._device)
        return tensor, self._copy(tensor, host)

    def wait(self, token: torch.cuda.Event) -> None:
        """See `Transfers`."""
        self._main.wait_event(token)

    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        fork, done = torch.cuda.Event(), torch.cuda.Event()
        fork.record(self._main)
        self._side.wait_event(fork)
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
        done.record(self._side)
        return done


class HostTransfers:
    """Copies at once; for the reference executor."""

    def begin(self) -> None:
        """See `Transfers`."""

    def offload(self, source: Tensor, host: Tensor) -> None:
        """See `Transfers`."""
        host.copy_(source)

    def load(self, host: Tensor) -> tuple[Tensor, None]:
        """See `Transfers`."""
        return host.clone(), None

    def wait(self, token: None) -> None:
        """See `Transfers`."""
