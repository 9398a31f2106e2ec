"""What a model hands to the engine so that a piece of it can become a graph."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .fallback import Fallback
from .planning.buckets import Bucket

Buffers = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one static input of a region.

    Attributes:
        shape: Shape in one bucket.
        dtype: Element type; the batch's tensor is converted on copy as eager would.
        differentiable: Whether the region returns a gradient for this input.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = False


class RegionProgram(Protocol):
    """A piece of a model with inputs of variable size, made static by padding to a bucket's capacity.

    `forward` sees buffers and the bucket only, never a batch: a value that changes from batch to batch can reach the
    graph through a buffer alone, which is why a replay cannot use another batch's metadata.
    """

    name: str

    def modules(self) -> Sequence[nn.Module]:
        """Return the modules whose parameters `forward` uses."""

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """Return the bucket's static inputs."""

    def size(self, batch: Any) -> int:
        """Return the batch's size in tokens, known to the host without reading the device."""

    def refuse(self, batch: Any, bucket: Bucket) -> Fallback | None:
        """Return why this batch, small enough in tokens, may not use the bucket, or None if it may."""

    def load(self, buffers: Buffers, batch: Any) -> None:
        """Write the batch into the buffers and zero what it leaves unused, without reading the device."""

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """Write finite values that fill the bucket, for warm-up passes."""

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """Compute the padded outputs; rows come first in each."""

    def recording(self) -> AbstractContextManager[None]:
        """Return what is entered around each run of `forward` and of its backward that is recorded."""

    def output_rows(self, batch: Any) -> tuple[int, ...]:
        """Return how many leading rows of each output are real."""

    def differentiable_inputs(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the batch's tensors that match the differentiable specs, in their order; their rows fill the first."""
