"""Recordings and how they are made: CUDA graphs on a GPU, plain execution everywhere else."""

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...announce import announce, announce_once, warn
from ..errors import CaptureError, OtherRankFailed, named, release_frames
from ..memory.pools import Arena, Making, PlainMemory, Pool, SlotMemory, making_in
from ..memory.ranges import AddressRange, DeviceMemoryError, NoDeviceMemory, VirtualMemory, close_left, driver_of
from ..memory.returning import Home
from .capture import capture_graph, default_generator
from .recording import Activations, Gradients, RegionBody
from .streams import ReplayStream, SideStream

# Of streams, and so of the kernels recorded on them. Main work that has concurrent side work goes first.
PRIORITY, MAIN_PRIORITY = 0, -1

# Entered around passes whose values nobody reads; they may leave out what waits for other ranks.
Isolated = Callable[[], AbstractContextManager[None]]

# Makes the buffers that a backward reads, zeroed, from the outputs it belongs to.
MakeOutputGradients = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
# Called around the warm-up of a recording.
Hook = Callable[[], None]


class ReferenceRecording:
    """Replays by executing the body: the same buffers and padding as a graph, on any device.

    Attributes:
        outputs: What a forward fills.
    """

    def __init__(self, body: RegionBody, outputs: tuple[Tensor, ...]) -> None:
        self._body = body
        self.outputs = outputs

    def forward(self) -> None:
        """Fill `outputs` from the input buffers."""
        for static, fresh in zip(self.outputs, self._body.forward(), strict=True):
            static.copy_(fresh)
        self._body.activations.join()
        if not self._body.has_backward:
            self._body.forget()

    def backward(self) -> Gradients:
        """Turn the output-gradient buffers into gradients, after `forward` of the same slot."""
        gradients = self._body.backward()
        self._body.forget()
        return gradients

    def record_backward(self) -> None:
        """Record the backward, perhaps behind what other recordings in the same memory record, once.

        What the forward left for it is gone then. Here every replay runs it.
        """


class CudaGraphRecording:
    """Two CUDA graphs, forward and backward, in one memory pool; the forward is captured at once.

    Args:
        body: The work.
        pool: What it takes memory from.
        stream: Of the capture.
        generators: What both graphs may draw from, besides the default generator.
        replay_stream: Takes graphs that copy activations to the host; others replay on the main stream.
        launched: Called after each launch with what was launched; None where nobody wants to know.
    """

    def __init__(
        self,
        body: RegionBody,
        pool: Pool,
        stream: torch.cuda.Stream,
        generators: Sequence[torch.Generator],
        replay_stream: ReplayStream,
        launched: Callable[[str], None] | None,
    ) -> None:
        self._replay_stream, self._launched = replay_stream, launched
        self._name, self._copies = body.name, body.activations.copies
        self._forward = torch.cuda.CUDAGraph()
        self._backward = torch.cuda.CUDAGraph()
        try:
            with pool.taking(), capture_graph(self._forward, pool.handle, stream, generators):
                self.outputs = body.forward()
                self._record_event(stream)
                body.activations.join()
        except BaseException:
            body.forget()
            raise
        self._capturing: tuple[Any, ...] | None = body, pool, stream, generators

    def record_backward(self) -> None:
        """See `ReferenceRecording`."""
        if self._capturing is None:
            raise RuntimeError("a backward is captured once, after its forward")
        (body, pool, stream, generators), self._capturing = self._capturing, None
        try:
            if body.has_backward:
                with pool.taking(), capture_graph(self._backward, pool.handle, stream, generators):
                    gradients = body.backward()
                    self._record_event(stream)
                inputs, parameters = (
                    tuple(None if each is None else pool.outlasting(each) for each in of)
                    for of in (gradients.inputs, gradients.parameters)
                )
                self._gradients = Gradients(inputs, parameters, gradients.reach)
        finally:
            body.forget()
        self.outputs = tuple(map(pool.outlasting, self.outputs))

    def _record_event(self, stream: torch.cuda.Stream) -> None:
        if self._copies:
            self._replay_stream.record_event(stream)

    def forward(self) -> None:
        """See `ReferenceRecording`."""
        self._replay_stream.launch(self._forward.replay, self._copies)
        if self._launched is not None:
            self._launched(f"replay of the forward of {self._name}")

    def backward(self) -> Gradients:
        """See `ReferenceRecording`."""
        self._replay_stream.launch(self._backward.replay, self._copies)
        if self._launched is not None:
            self._launched(f"replay of the backward of {self._name}")
        return self._gradients


# A region that can be replayed on whatever its buffers hold.
Recording = ReferenceRecording | CudaGraphRecording


class Executor(ABC):
    """Makes recordings and owns what they share.

    Args:
        device: Where; None is the CPU.
        isolated: Entered around warm-up passes, and where a graph would be captured, which runs nothing.
        pre_warmup_hook, post_warmup_hook: Called once before and once after all warm-up passes of a recording. The
            second is called after a pass that failed, too.

    Attributes:
        memory_away: Whether memory of recordings and static tensors has left the device.
        static_memory: Entered around the making of each tensor that recordings of one slot read.
    """

    memory_away = False
    static_memory: Making = nullcontext
    _generators: Callable[[], Sequence[torch.Generator]] = tuple
    _releasable = False

    def __init__(
        self,
        device: torch.device | None = None,
        isolated: Isolated = nullcontext,
        pre_warmup_hook: Hook = lambda: None,
        post_warmup_hook: Hook = lambda: None,
    ) -> None:
        self.device, self.isolated = device or torch.device("cpu"), isolated
        self._hooks = pre_warmup_hook, post_warmup_hook

    @abstractmethod
    def new_memory(self) -> SlotMemory:
        """Return memory for the recordings of one slot."""

    def warm_up(self, body: RegionBody, make_output_gradients: MakeOutputGradients, briefly: bool = False) -> None:
        """Run the body outside any capture, with all activations on the device.

        A whole pass and one over one layer of each kind, or the latter alone. The first pass of a process compiles
        kernels, loads libraries and takes workspaces; a model's first fills caches; cuDNN may build another plan once
        gradients flow. The second one, which sees none of it, is looked at.

        Args:
            body: What is to be recorded.
            make_output_gradients: Makes the buffers that the backward reads.
            briefly: Whether only shapes are new, which one layer of each kind sees.
        """
        before, after = self._hooks
        before()
        try:
            with self._aside(body):
                _run(body, make_output_gradients, briefly)
                if not briefly:
                    with body.looked_at():
                        _run(body, make_output_gradients, briefly=True)
                        body.forget()
            if not briefly:
                self.tidy()
        finally:
            after()

    def observe(self, body: RegionBody, activations: Activations) -> None:
        """Run a warmed-up body once more, outside any capture, its activations kept by `activations`."""
        before, body.activations = body.activations, activations
        try:
            with self._aside(body):
                body.forward()
                body.activations.join()
                body.backward()
            self.tidy()
        finally:
            body.activations = before

    @abstractmethod
    def _aside(self, body: RegionBody) -> AbstractContextManager[None]:
        """Return what passes of a body run in, of which nothing is left afterwards."""

    @abstractmethod
    def side_stream(self) -> SideStream:
        """Return what takes a recording's work off the main stream."""

    @abstractmethod
    def record_forward(self, body: RegionBody, pool: Pool) -> Recording:
        """Record the body's forward; what it saves stays until `record_backward`."""

    def generators(self) -> Sequence[torch.Generator]:
        """Return what work that is recorded may draw random numbers from."""
        return default_generator(self.device), *self._generators()

    def tidy(self) -> None:
        """Give memory back that no recording needs any more."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        close_left()

    def release_memory(self) -> int:
        """Take memory of recordings and static tensors off the device, if it can leave; returns how many bytes left.

        Raises:
            DeviceMemoryError: The driver failed.
        """
        return 0

    def restore_memory(self) -> None:
        """Take it back, to the same addresses; the content of static tensors is what it was.

        Raises:
            NoDeviceMemory: There is not enough; then none came back.
        """
        self.memory_away = False

    def home(self) -> Home | None:
        """Return addresses of their own for a region's weights; None where memory stays."""
        return Home(self.device) if self._releasable else None


def give_up(error: Exception, what: str, consequence: str, strict: bool, executor: Executor) -> None:
    """Say that something could not be captured, and give memory back that the error's frames still hold.

    Raises:
        CaptureError: The run is strict.
    """
    if strict:
        raise CaptureError(f"{what} could not be captured: {named(error)}") from error
    if not isinstance(error, OtherRankFailed):  # the rank that failed reports it
        warn(f"{what} could not be captured, {consequence}: {named(error)}")
    release_frames(error)
    executor.tidy()


@functools.cache
def _recording_stream(device: torch.device, priority: int, use: str) -> torch.cuda.Stream:
    """Return the stream of all recordings with such a use: PyTorch keeps workspaces for each stream for good."""
    return torch.cuda.Stream(device, priority=priority)


class CudaGraphExecutor(Executor):
    """Records CUDA graphs on a stream of its own.

    Args:
        device: Where; None is the current device.
        generators: Returns what recorded work may draw random numbers from, besides the default generator.
        isolated, pre_warmup_hook, post_warmup_hook: See `Executor`.
        cuda_graph_stream, cuda_graph_event: See `ReplayStream`.
        launched: Called after each replay with what it was; None where nobody wants to know.
        side_stream: Whether recordings may have side work, which then gives way to the main work.
        arenas: Whether recordings of a slot use memory from the same address on, if the driver can do it; else those of
            larger buckets that come later have memory beside it.
        releasable: Whether memory of arenas and static tensors can leave the device.

    Raises:
        ValueError: An event without a stream.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        generators: Callable[[], Sequence[torch.Generator]] = tuple,
        isolated: Isolated = nullcontext,
        launched: Callable[[str], None] | None = None,
        pre_warmup_hook: Hook = lambda: None,
        post_warmup_hook: Hook = lambda: None,
        cuda_graph_stream: torch.cuda.Stream | None = None,
        cuda_graph_event: torch.cuda.Event | None = None,
        side_stream: bool = False,
        arenas: bool = True,
        releasable: bool = False,
    ) -> None:
        self._replay_stream = ReplayStream(cuda_graph_stream, cuda_graph_event)
        device = device or torch.device("cuda", torch.cuda.current_device())
        super().__init__(device, isolated, pre_warmup_hook, post_warmup_hook)
        self._launched = launched
        self._stream = _recording_stream(self.device, MAIN_PRIORITY if side_stream else PRIORITY, "main")
        self._side_stream = _recording_stream(self.device, PRIORITY, "side")
        self._generators = generators
        self._driver = driver_of(self.device) if arenas else None
        self._ranges: weakref.WeakSet[AddressRange] = weakref.WeakSet()
        self._releasable = releasable and self._driver is not None
        if self._releasable and self._driver is not None:
            self.static_memory = making_in(self._new_range(self._driver, keeps=True))

    def _new_range(self, driver: VirtualMemory, keeps: bool = False) -> AddressRange:
        made = AddressRange(driver, torch.cuda.get_device_properties(self.device).total_memory, keeps)
        self._ranges.add(made)
        return made

    def new_memory(self) -> SlotMemory:
        """See `Executor`. What nothing is left of goes back first: a capture cannot free any.

        Raises:
            CaptureError: PyTorch runs with another allocator than its own.
        """
        # Others have no private pools, in which buckets share memory and that can be measured.
        if (backend := torch.cuda.memory.get_allocator_backend()) != "native":
            raise CaptureError(
                f"graphs need PyTorch's native memory allocator, this process runs with {backend}: remove it from "
                "PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"
            )
        torch.cuda.empty_cache()
        close_left()
        # Where PyTorch was told a limit, it counts what each recording of a slot uses against it.
        limited = torch.cuda.get_per_process_memory_fraction(self.device) < 1
        if limited and self._driver is not None:
            announce_once("graphs have their memory in PyTorch's pools: the process has set a memory limit in PyTorch")
        elif self._driver is not None:
            try:
                return Arena(partial(self._new_range, self._driver))
            except DeviceMemoryError as error:  # hundreds of parts with many slots each
                announce(f"further graphs have their memory in PyTorch's pools: {error}")
                self._driver = None
        return PlainMemory()

    @contextmanager
    def _aside(self, body: RegionBody) -> Iterator[None]:
        """See `Executor`: on the stream of recordings."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(self._stream), self.isolated():
                yield
        finally:
            body.forget()
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
        torch.cuda.synchronize(self.device)

    def side_stream(self) -> SideStream:
        """See `Executor`. All recordings share one side stream: their memory may overlap, as on the main stream."""
        return SideStream(self._side_stream)

    def record_forward(self, body: RegionBody, pool: Pool) -> Recording:
        """See `Executor`."""
        return CudaGraphRecording(body, pool, self._stream, self._generators(), self._replay_stream, self._launched)

    def release_memory(self) -> int:
        """See `Executor`."""
        if not self._releasable:
            return 0
        self.tidy()
        try:
            return sum(each.release() for each in self._ranges)
        finally:
            self.memory_away = any(each.away for each in self._ranges)

    def restore_memory(self) -> None:
        """See `Executor`. PyTorch's cache is emptied for it if need be."""
        try:
            self._restore()
        except NoDeviceMemory:
            self.tidy()
            self._restore()
        self.memory_away = False

    def _restore(self) -> None:
        there = []
        try:
            for each in self._ranges:
                if each.away:
                    each.restore()
                    there.append(each)
        except NoDeviceMemory:
            for each in there:
                each.release()
            raise


class ReferenceExecutor(Executor):
    """Runs the recorded work eagerly over the same static buffers; needs no GPU.

    Output memory starts as NaN, as a graph's may, so that a row nothing wrote is seen.
    """

    def new_memory(self) -> SlotMemory:
        """See `Executor`."""
        return SlotMemory()

    @contextmanager
    def _aside(self, body: RegionBody) -> Iterator[None]:
        """See `Executor`."""
        try:
            with self.isolated():
                yield
        finally:
            body.forget()

    def side_stream(self) -> SideStream:
        """See `Executor`."""
        return SideStream(None)

    def record_forward(self, body: RegionBody, pool: Pool) -> Recording:
        """See `Executor`: a replay runs both."""
        with self.isolated():
            outputs: tuple[Tensor, ...] = tuple(torch.full_like(o, torch.nan) for o in body.forward())
            body.activations.join()
        body.forget()
        return ReferenceRecording(body, outputs)


def _run(body: RegionBody, make_output_gradients: MakeOutputGradients, briefly: bool) -> None:
    """Run forward and, if recorded, backward once; `briefly` with one layer of each kind."""
    with body.one_layer_of_each_kind() if briefly else nullcontext():
        outputs = body.forward()
        if body.has_backward:
            body.output_gradients = make_output_gradients(outputs)
            body.backward()
