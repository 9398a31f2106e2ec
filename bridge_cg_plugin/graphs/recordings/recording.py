"""One region at one bucket: the work that is recorded, and its two ways of being replayed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import repeat
from threading import RLock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.utils import parametrize

from ..instance import every_module, walked_once
from ..memory.pools import Pool, outlasting
from ..planning.buckets import Bucket
from ..program import Buffers, RegionProgram
from ..replays.gradients import GradientSinks
from ..replays.slot import StaticTensors
from ..replays.streams import ReplayStream
from .activations import Activations
from .capture import capture_graph
from .layer_kinds import one_layer_of_each_kind
from .parameters import ParameterAliases, Root, reach_of
from .side_stream import SideStream

MAIN_STREAM = ReplayStream()
# What stands in for others while a region is recorded, as kernels and a side stream, does so for the whole process.
ONE_THREAD = RLock()


@dataclass(slots=True)
class Gradients:
    """What a backward leaves behind, in static memory: overwritten by the next backward of the same slot.

    Attributes:
        inputs: Gradients of the differentiable inputs.
        parameters: Gradients of the parameters that autograd must hand on.
        reach: Of each output, the places among inputs and then parameters that a backward from it reaches.
    """

    inputs: tuple[Tensor | None, ...]
    parameters: tuple[Tensor | None, ...]
    reach: tuple[frozenset[int], ...]

    def through(self, output_gradients: Sequence[Tensor | None]) -> "Gradients":
        """Return what eager's backward gives: nothing for what only outputs without a gradient need, not zeros."""
        if not [None for g in output_gradients if g is None]:
            return self
        given = (of_output for of_output, g in zip(self.reach, output_gradients, strict=True) if g is not None)
        reached = frozenset().union(*given)
        kept = [g if place in reached else None for place, g in enumerate(self.inputs + self.parameters)]
        split = len(self.inputs)
        return Gradients(tuple(kept[:split]), tuple(kept[split:]), self.reach)


class Mode(NamedTuple):
    """What a recording was made as, besides its bucket; a tuple as that is.

    Attributes:
        gradients: Whether a backward can follow the forward.
        training: Whether the modules were in training mode, which decides dropout; for each module where they differ.
    """

    gradients: bool
    training: bool | tuple[bool, ...]


TRAINING = Mode(gradients=True, training=True)
EVALUATION = Mode(gradients=False, training=False)


class Recording(Protocol):
    """A region that can be replayed on whatever its buffers hold."""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What a forward fills."""

    def forward(self) -> None:
        """Fill `outputs` from the input buffers."""

    def backward(self) -> Gradients:
        """Turn the output-gradient buffers into gradients, after `forward` of the same slot."""

    def record_backward(self) -> None:
        """Record the backward, perhaps behind what other recordings in the same memory record, once.

        What the forward left for it is gone then.
        """


class RegionBody:
    """The recorded work: forward over the input buffers, backward from the output-gradient buffers.

    Args:
        program: The piece of the model.
        buffers: The bucket's static inputs.
        bucket: What is recorded for.
        aliases: Stand-ins for the program's parameters.
        sinks: Where parameter gradients go; None records a forward only, without autograd.
        side: Takes work that the main stream need not wait for; None leaves all of it on one stream.
        passing: Entered around every pass: sets modes, and what modules note in attributes then is their own doing.
        border: Where outputs and gradients of inputs are copied to, so that their own memory is free at once; None
            leaves them in the recording's memory.

    Attributes:
        bucket: What is recorded for.
        state: Number of what the model is; see `Source`.
        output_gradients: Buffers that the backward reads.
        activations: What keeps the tensors that autograd saves; None leaves them where they are.
        looked_at: Entered around the pass over one layer of each kind that follows a whole warm-up pass.
    """

    def __init__(
        self,
        program: RegionProgram,
        buffers: Buffers,
        bucket: Bucket,
        aliases: ParameterAliases,
        sinks: GradientSinks | None,
        side: SideStream | None = None,
        passing: Callable[[], AbstractContextManager[object]] = nullcontext,
        border: StaticTensors | None = None,
    ) -> None:
        self._side, self._passing, self._border = side, passing, border
        self._program, self._buffers, self._bucket = program, buffers, bucket
        self._aliases, self._sinks = aliases, sinks
        specs = program.input_specs(bucket)
        self._differentiable = tuple(name for name, spec in specs.items() if spec.differentiable)
        self.output_gradients: tuple[Tensor, ...] = ()
        self.bucket, self.state = bucket, 0
        self.activations: Activations | None = None
        self.looked_at: Callable[[], AbstractContextManager[None]] = nullcontext
        self._device_type = next(iter(buffers.values())).device.type
        self._live: tuple[list[Root | None], list[Tensor], dict[nn.Parameter, nn.Parameter]] | None = None

    def forward(self) -> tuple[Tensor, ...]:
        """Run forward, keeping its autograd graph for `backward` when gradients are wanted."""
        buffers, leaves = dict(self._buffers), []
        if self._side is not None:
            self._side.forget()
        handed = () if self._sinks is None else self._sinks.handed
        with (
            ONE_THREAD,
            torch.set_grad_enabled(self._sinks is not None),
            _own_autocast_cache(),
            _own_parametrizations(),
            self._passing(),
            self._aliases.active(handed) as aliases,
            _own_saved_tensors(),
            self._side_stream_active(),
            walked_once(),
            self._program.recording(),
            self._saving(aliases),
        ):
            if self._sinks is not None:
                for name in self._differentiable:
                    leaves.append(buffers[name].detach().requires_grad_())
                    # No leaf, as what an earlier module returns: autocast keeps the casts of leaves.
                    buffers[name] = leaves[-1].view_as(leaves[-1])
            outputs = self._program.forward(buffers, self._bucket)
        if not isinstance(outputs, tuple):
            raise TypeError(f"{self.name}: its forward returned a {type(outputs).__name__}, not a tuple of tensors")
        self._live = (list(map(self._root, outputs)), leaves, aliases)
        return tuple(self._at_border(f"output:{i}", output.detach()) for i, output in enumerate(outputs))

    def _root(self, output: Tensor) -> Root | None:
        """Return where the backward through an output begins, None where there is none."""
        if not output.requires_grad:
            return None
        return output if self._border is None else get_gradient_edge(output)

    def _at_border(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of this pass where it may stay."""
        if self._border is None:
            return tensor
        return self._border.view(name, tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def backward(self) -> Gradients:
        """Run backward over the last forward's autograd graph."""
        if self._live is None or self._sinks is None:
            raise RuntimeError(f"{self.name}: a backward follows a forward with gradients")
        roots, leaves, aliases = self._live
        targets = [*leaves, *(aliases[p] for p in self._sinks.parameters)]
        pairs = [(r, g) for r, g in zip(roots, self.output_gradients, strict=True) if r is not None]
        main_grads = (*repeat(None, len(leaves)), *self._sinks.main_grads)
        handed_on = {i: t for i, (t, g) in enumerate(zip(targets, main_grads, strict=True)) if g is None}
        reach = reach_of(roots, handed_on)
        restoring = nullcontext() if self.activations is None else self.activations.restoring()
        with (
            ONE_THREAD,
            torch.autocast(self._device_type, enabled=False),  # as users call backward: behind the forward's autocast
            self._passing(),
            self._sinks.attached(aliases),
            self._side_stream_active(),
            walked_once(),
            self._program.recording(),
            restoring,
        ):
            gradients = _differentiated(pairs, targets)
        split = len(leaves)
        inputs = enumerate(gradients[:split])
        at_border = tuple(None if g is None else self._at_border(f"input_gradient:{i}", g) for i, g in inputs)
        return Gradients(at_border, self._sinks.returned(gradients[split:]), reach)

    def one_layer_of_each_kind(self) -> AbstractContextManager[None]:
        """Be around passes whose values nobody reads: see `layer_kinds`."""
        return one_layer_of_each_kind(self._program.modules())

    @property
    def static_bytes(self) -> int:
        """Device memory of the buffers that the work reads, and of gradients that it returns."""
        return self.returned_bytes + sum(tensor.nbytes for tensor in self.static_tensors)

    @property
    def returned_bytes(self) -> int:
        """Device memory of gradients that the work returns."""
        return 0 if self._sinks is None else self._sinks.static_bytes

    @property
    def static_tensors(self) -> tuple[Tensor, ...]:
        """The buffers that the work reads, some of which other regions may have as well."""
        return (*self._buffers.values(), *self.output_gradients)

    @property
    def copies(self) -> bool:
        """Whether activations are copied to the host and back."""
        return self.activations is not None and self.activations.copies

    def join(self) -> None:
        """Let the current stream wait for copies of activations that the last forward or backward began."""
        if self.activations is not None:
            self.activations.join()

    def forget(self) -> None:
        """Free the autograd graph of the last forward."""
        self._live = None
        if self._side is not None:
            self._side.forget()
        if self.activations is not None:
            self.activations.forget()

    def _side_stream_active(self) -> AbstractContextManager[None]:
        return nullcontext() if self._side is None else self._side.active()

    def _saving(self, aliases: Mapping[nn.Parameter, nn.Parameter]) -> AbstractContextManager[None]:
        if self.activations is None or self._sinks is None:
            return nullcontext()
        held = (buffer for module in every_module(self._program.modules()) for buffer in module.buffers(recurse=False))
        return self.activations.saving((*self._buffers.values(), *aliases.values(), *held))

    @property
    def name(self) -> str:
        """The program's name."""
        return self._program.name

    @property
    def has_backward(self) -> bool:
        """Whether gradients are recorded."""
        return self._sinks is not None


@contextmanager
def _own_autocast_cache() -> Iterator[None]:
    """Keep weights that autocast casts for one pass: one from an earlier pass would be recorded as a constant."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _own_parametrizations() -> Iterator[None]:
    """Compute parametrized weights in this pass: one that `parametrize.cached` kept would be recorded as a constant."""
    before = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = before


def _own_saved_tensors() -> AbstractContextManager[None]:
    """Keep what autograd saves from hooks of the caller, which may move it to the host."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved)


def _differentiated(pairs: Sequence[tuple[Root, Tensor]], targets: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the targets' gradients; none where nothing is trained, as where adapters are switched off."""
    if not pairs:
        return (None,) * len(targets)
    outputs, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, targets, gradients, allow_unused=True)


class ReferenceRecording:
    """Replays by executing the body: the same buffers and padding as a graph, on any device."""

    def __init__(self, body: RegionBody, outputs: tuple[Tensor, ...]) -> None:
        self._body = body
        self.outputs = outputs

    def forward(self) -> None:
        """See `Recording`."""
        for static, fresh in zip(self.outputs, self._body.forward(), strict=True):
            static.copy_(fresh)
        self._body.join()
        if not self._body.has_backward:
            self._body.forget()

    def backward(self) -> Gradients:
        """See `Recording`."""
        gradients = self._body.backward()
        self._body.forget()
        return gradients

    def record_backward(self) -> None:
        """See `Recording`: every replay runs it."""


class CudaGraphRecording:
    """Two CUDA graphs, forward and backward, in one memory pool; the forward is captured at once.

    Args:
        body: The work.
        pool: What it takes memory from.
        stream: Of the capture.
        generators: What both graphs may draw from, besides the default generator.
        replay_stream: Takes graphs that copy activations to the host; others replay on the main stream.
        launched: Called after each launch with what was launched.
    """

    def __init__(
        self,
        body: RegionBody,
        pool: Pool,
        stream: torch.cuda.Stream,
        generators: Sequence[torch.Generator] = (),
        replay_stream: ReplayStream = MAIN_STREAM,
        launched: Callable[[str], None] | None = None,
    ) -> None:
        self._replay_stream, self._launched = replay_stream, launched
        self._name, self._copies = body.name, body.copies
        self._forward = torch.cuda.CUDAGraph()
        self._backward = torch.cuda.CUDAGraph()
        try:
            with pool.taking(), capture_graph(self._forward, pool.handle, stream, generators):
                self.outputs = body.forward()
                self._record_event(stream)
                body.join()
        except BaseException:
            body.forget()
            raise
        self._capturing: tuple[Any, ...] | None = body, pool, stream, generators

    def record_backward(self) -> None:
        """See `Recording`."""
        if self._capturing is None:
            raise RuntimeError("a backward is captured once, after its forward")
        (body, pool, stream, generators), self._capturing = self._capturing, None
        try:
            if body.has_backward:
                with pool.taking(), capture_graph(self._backward, pool.handle, stream, generators):
                    gradients = body.backward()
                    self._record_event(stream)
                inputs, parameters = outlasting(pool, gradients.inputs), outlasting(pool, gradients.parameters)
                self._gradients = Gradients(inputs, parameters, gradients.reach)
        finally:
            body.forget()
        self.outputs = tuple(map(pool.outlasting, self.outputs))

    def _record_event(self, stream: torch.cuda.Stream) -> None:
        if self._copies:
            self._replay_stream.record_event(stream)

    def forward(self) -> None:
        """See `Recording`."""
        self._replay_stream.launch(self._forward.replay, self._copies)
        if self._launched is not None:
            self._launched(f"replay of the forward of {self._name}")

    def backward(self) -> Gradients:
        """See `Recording`."""
        self._replay_stream.launch(self._backward.replay, self._copies)
        if self._launched is not None:
            self._launched(f"replay of the backward of {self._name}")
        return self._gradients
