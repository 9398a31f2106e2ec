"""What the engine asks of an object that moves activations off the device, for a whole region."""

from typing import Protocol

from .activations import Activations
from .executor import Executor
from .recording import RegionBody


class Offloading(Protocol):
    """Makes a recording's activations once its warm-up is over."""

    def prepare(self, executor: Executor, body: RegionBody, slot: int) -> Activations | None:
        """Return what keeps the activations of this work in a slot, or None where they stay in the graph's memory.

        Raises:
            CaptureError: They cannot be kept as asked for.
        """

    def accepts(self, nbytes: int) -> bool:
        """Whether a slot, all buckets recorded, may take so many bytes; if not, `prepare` is asked again for less.

        Raises:
            CaptureError: It takes too much and cannot take less.
        """

    def release(self) -> None:
        """Give back all host memory."""

    @property
    def pinned_bytes(self) -> int:
        """Page-locked host memory held, in bytes."""
