"""Where the kernels of experts run, and tables on the device by which one kernel reaches many tensors."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def runs_kernels(tensor: Tensor) -> bool:
    """Whether a tensor is where Triton's kernels run; elsewhere PyTorch's functions compute the same."""
    return tensor.is_cuda


# Bytes of the largest load of a kernel.
WIDEST_LOAD = 16


# Where matrices are: the first of them; `[matrices]` int64 on their device, each one's distance from the first in
# elements; how many elements a kernel may load at once, counted from the beginning of any of them.
Table = tuple[Tensor, Tensor, int]


class Tables:
    """Keeps the distances of every set of tensors that was asked for.

    They are a copy from the host, which must not be recorded: the passes before a capture make it. Recordings read them
    for as long as they are replayed. Tensors are not kept: they may be freed and taken again elsewhere.
    """

    def __init__(self) -> None:
        self._distances: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    def of(self, tensors: Sequence[Tensor]) -> Table:
        """Return where contiguous tensors of one device and dtype are.

        Raises:
            RuntimeError: A capture is under way and no pass before it has made the table.
        """
        first = tensors[0].detach()
        start, size = first.data_ptr(), first.element_size()
        distances = tuple((address - start) // size for address in map(Tensor.data_ptr, tensors))
        key = first.device, distances
        if key not in self._distances:
            if first.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a table of experts' matrices was first asked for inside a capture")
            self._distances[key] = torch.tensor(distances, dtype=torch.int64, device=first.device)
        return first, self._distances[key], _vector(first, distances)


def table_of_slices(stacked: Tensor) -> Table:
    """Return where the slices of a contiguous tensor are, found on the device: this may be recorded.

    Args:
        stacked: `[matrices, ...]`.
    """
    step = stacked[0].numel()
    distances = torch.arange(stacked.shape[0], device=stacked.device) * step
    return stacked, distances, _vector(stacked, [step])


def _vector(first: Tensor, distances: Sequence[int]) -> int:
    widest = WIDEST_LOAD // first.element_size()
    return math.gcd(widest, first.data_ptr() // first.element_size(), *distances)
