"""What the engine asks of an object that moves activations off the device."""

from collections.abc import Sequence
from typing import Protocol

from .activations import Activations
from .executor import Executor
from .recording import RegionBody


class Offloading(Protocol):
    """Makes the activations of a region, or of parts that run one after the other and share a slot's memory."""

    def prepare(self, executor: Executor, bodies: Sequence[RegionBody], slot: int) -> Sequence[Activations | None]:
        """Return what keeps each body's activations in a slot, None where they stay in the graph's memory.

        Their warm-up is over.

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
