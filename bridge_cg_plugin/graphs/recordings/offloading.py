"""What the engine asks of an object that moves activations off the device, for a whole region or a chain of them."""

from collections.abc import Sequence
from typing import Protocol

from .activations import Activations
from .executor import Executor
from .recording import RegionBody


class _Offloading(Protocol):
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


class Offloading(_Offloading, Protocol):
    """Makes a recording's activations once its warm-up is over."""

    def prepare(self, executor: Executor, body: RegionBody, slot: int) -> Activations | None:
        """Return what keeps the activations of this work in a slot, or None where they stay in the graph's memory.

        Raises:
            CaptureError: They cannot be kept as asked for.
        """


class ChainOffloading(_Offloading, Protocol):
    """Makes the activations of parts that run one after the other and share a slot's memory."""

    def prepare_chain(
        self, executor: Executor, bodies: Sequence[RegionBody], slot: int
    ) -> Sequence[Activations | None]:
        """Return what keeps each part's activations; see `Offloading`.

        Raises:
            CaptureError: They cannot be kept as asked for.
        """
