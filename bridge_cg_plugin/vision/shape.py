"""The size of a microbatch's images: what eager's time grows with, and what buckets are chosen by. Imports no torch."""

from typing import NamedTuple, Protocol


class Sized(Protocol):
    """A microbatch, with its size on the host; see `EncoderBatch`."""

    @property
    def tokens(self) -> int:
        """Patches."""

    @property
    def shape(self) -> "Shape":
        """How large it is."""


class Shape(NamedTuple):
    """A microbatch's size. Buckets refuse a shape as they refuse the microbatch.

    Attributes:
        tokens: Patches.
        frames: Images and video frames: attention segments.
        largest_frame: Patches of the largest frame.
    """

    tokens: int
    frames: int
    largest_frame: int

    @property
    def shape(self) -> "Shape":
        """Itself."""
        return self

    def covers(self, other: "Shape") -> bool:
        """Whether nothing here is smaller, so that eager takes at least as long."""
        bigger = self.tokens >= other.tokens and self.frames >= other.frames
        return bigger and self.largest_frame >= other.largest_frame
