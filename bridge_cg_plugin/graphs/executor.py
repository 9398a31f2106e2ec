"""How recordings are made: CUDA graphs on a GPU, plain execution everywhere else."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from .recording import CudaGraphRecording, Recording, ReferenceRecording, RegionBody, ToldRecording

# cuDNN picks a plan in the first pass and may build another once gradients flow; the second pass sees neither.
WARMUP_PASSES = 2

# Entered around passes whose values nobody reads; they may leave out what waits for other ranks.
Isolated = Callable[[], AbstractContextManager[None]]

# Makes the buffers that a backward reads, zeroed, from the outputs it belongs to.
MakeOutputGradients = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


class Executor(Protocol):
    """Makes recordings and owns what they share."""

    name: str
    device: torch.device
    isolated: Isolated

    def new_pool(self) -> object:
        """Return a memory pool for the recordings of one slot."""

    def warm_up(self, body: RegionBody, make_output_gradients: MakeOutputGradients) -> None:
        """Run the body outside any capture."""

    def record(self, body: RegionBody, pool: object) -> Recording:
        """Record the body."""

    def pool_bytes(self, pool: object) -> int:
        """Return the device memory that the pool holds, in bytes."""


class CudaGraphExecutor:
    """Records CUDA graphs on a stream of its own.

    Args:
        device: Where; None is the current device.
        generators: Returns what recorded work may draw random numbers from, besides the default generator.
        isolated: Entered around warm-up passes.
        launched: Called after each replay with what it was; None where nobody wants to know.
    """

    name = "cuda_graph"

    def __init__(
        self,
        device: torch.device | None = None,
        generators: Callable[[], Sequence[torch.Generator]] = tuple,
        isolated: Isolated = nullcontext,
        launched: Callable[[str], None] | None = None,
    ) -> None:
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self._launched = launched
        self._stream = torch.cuda.Stream(self.device)
        self._generators = generators
        self.isolated = isolated

    def new_pool(self) -> tuple[int, int]:
        """See `Executor`."""
        return torch.cuda.graph_pool_handle()

    def warm_up(self, body: RegionBody, make_output_gradients: MakeOutputGradients) -> None:
        """See `Executor`."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._stream), self.isolated():
                for _ in range(WARMUP_PASSES):
                    run_once(body, make_output_gradients)
        finally:
            body.forget()
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def record(self, body: RegionBody, pool) -> Recording:
        """See `Executor`."""
        made = CudaGraphRecording(body, pool, self._stream, self._generators())
        return made if self._launched is None else ToldRecording(made, self._launched, body.name)

    def pool_bytes(self, pool) -> int:
        """See `Executor`."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(pool))


class ReferenceExecutor:
    """Runs the recorded work eagerly over the same static buffers; needs no GPU.

    Output memory starts as NaN, as a graph's may, so that a row nothing wrote is seen.

    Args:
        device: Where; None is the CPU.
        isolated: Entered around warm-up passes, and where a graph would be captured, which runs nothing.
    """

    name = "reference"

    def __init__(self, device: torch.device | None = None, isolated: Isolated = nullcontext) -> None:
        self.device = device or torch.device("cpu")
        self.isolated = isolated

    def new_pool(self) -> None:
        """See `Executor`."""

    def warm_up(self, body: RegionBody, make_output_gradients: MakeOutputGradients) -> None:
        """See `Executor`."""
        try:
            with self.isolated():
                run_once(body, make_output_gradients)
        finally:
            body.forget()

    def record(self, body: RegionBody, pool: None) -> Recording:
        """See `Executor`."""
        with self.isolated():
            outputs: tuple[Tensor, ...] = tuple(torch.full_like(o, torch.nan) for o in body.forward())
        body.forget()
        return ReferenceRecording(body, outputs)

    def pool_bytes(self, pool: None) -> int:
        """See `Executor`."""
        return 0


def run_once(body: RegionBody, make_output_gradients: MakeOutputGradients) -> None:
    """Run forward and, if recorded, backward once."""
    outputs = body.forward()
    if body.has_backward:
        body.output_gradients = make_output_gradients(outputs)
        body.backward()
