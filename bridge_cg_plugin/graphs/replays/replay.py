"""Replaying a recording as one node of the autograd graph."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from .. import ranges
from ..buckets import Bucket
from ..changes.source import Recorded, Source
from ..errors import Overflow, ReplayError
from ..program import RegionProgram
from ..ranges import named_range
from ..recordings.recording import Gradients
from ..reports import RegionStatistics
from ..rows import copies, write_each
from .slot import Slot

NO_RANGE = nullcontext()


class BackwardObserver(Protocol):
    """Watches the backward of one replayed microbatch."""

    def before_backward(self, output_gradients: Sequence[Tensor | None]) -> None:
        """Called before the backward is replayed, with the gradients of the real rows."""

    def after_backward(self, gradients: Gradients) -> Gradients | None:
        """Called when it was replayed, before any gradient hook fires; may return others in their place."""


@dataclass(slots=True)
class Replay:
    """A microbatch's way through a recording: what was decided before it runs, and what its backward needs.

    Attributes:
        program: The region's.
        source: What the recording was made from.
        recorded: The recording.
        slot: The slot that it was made in; free until `run`.
        bucket: What it was made for.
        gradients: Whether a backward may follow.
        holds: Whether a source still lies where it was recorded; asked before the backward is launched.
        statistics: The region's.
        lease: Number of its hold on the slot, once it runs.
        observer: Watches the backward.
        rows: Real rows of each output.
        input_rows: Real rows of each differentiable input.
    """

    program: RegionProgram
    source: Source
    recorded: Recorded
    slot: Slot
    bucket: Bucket
    gradients: bool
    holds: Callable[[Source], bool]
    statistics: RegionStatistics
    lease: int | None = None
    observer: BackwardObserver | None = None
    rows: tuple[int, ...] = ()
    input_rows: tuple[int, ...] = ()

    def run(self, batch: Any, observer: BackwardObserver | None = None) -> tuple[Tensor, ...]:
        """Load a batch into the slot's buffers and replay, once; returns copies of the outputs' real rows.

        Args:
            batch: The microbatch.
            observer: Watches its backward.
        """
        self.observer = observer
        program, slot = self.program, self.slot
        with named_range(f"replay {program.name}, bucket {self.bucket}") if ranges.on else NO_RANGE:
            self.lease = slot.take()
            try:
                program.load(slot.buffers[self.bucket], batch)
                self.rows = program.output_rows(batch, self.bucket, self.recorded.recording.outputs)
                outputs: tuple[Tensor, ...]
                if not self.gradients:
                    outputs = self.launch()
                    self.release()
                else:
                    inputs = program.differentiable_inputs(batch)
                    self.input_rows = tuple(map(len, inputs))
                    # Without `Function.apply`'s look for functorch's wrappers, 0.2 ms for an encoder's parameters.
                    outputs = super(Function, _Replay).apply(self, *inputs, *self.source.sinks.receivers)
            except BaseException:
                self.release()
                raise
        self.statistics.replayed(self.bucket, program.size(batch), self.gradients)
        return outputs

    def release(self) -> None:
        """Give the slot back: by the backward, or when the autograd graph is freed; further calls do nothing."""
        if self.slot.lease == self.lease:
            self.slot.lease = None

    def __del__(self) -> None:
        self.release()

    def launch(self) -> tuple[Tensor, ...]:
        """Replay the forward; returns copies of the outputs' real rows.

        Raises:
            Overflow: The batch had too little room. The host waits to see that: nobody gets outputs that may be wrong.
        """
        self.recorded.recording.forward()
        outputs = copies(self.recorded.recording.outputs, self.rows)
        overflow = self.program.overflow(self.slot.buffers[self.bucket])
        if overflow is not None and overflow.item():
            raise Overflow
        return outputs


class _Replay(Function):
    @staticmethod
    def forward(ctx: Any, call: Replay, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        call.source.sinks.expect(ctx)
        return call.launch()

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ReplayError(
                "the gradients of a graphed microbatch cannot be differentiated (create_graph=True keeps an autograd "
                "graph, a CUDA graph has none); run such a microbatch eager"
            )
        call: Replay | None = ctx.call
        if call is None or call.slot.lease != call.lease:  # its activations are gone
            raise ReplayError(
                "the backward of a graphed microbatch ran twice (retain_graph=True keeps an autograd graph, not the "
                "activations inside a CUDA graph); run such a microbatch eager"
            )
        if not call.holds(call.source):
            raise ReplayError(
                f"{call.program.name}: between the forward and the backward of a graphed microbatch, memory of "
                "parameters or of their main_grad was moved or freed, a parameter was frozen or unfrozen, or a hook "
                "was put on one; do it between steps"
            )
        if (sinks := call.source.sinks).would_add_unasked():
            raise ReplayError(
                f"{call.program.name}: a graphed microbatch adds gradients to main_grad, which torch.autograd.grad and "
                "backward(inputs=) must not; run such a microbatch eager"
            )
        call.slot.order_after_last_use()
        if call.observer is not None:
            call.observer.before_backward(output_gradients)
        write_each(call.recorded.output_gradients, output_gradients)
        with named_range(f"replay {call.program.name}, backward") if ranges.on else NO_RANGE:
            gradients = call.recorded.recording.backward().through(output_gradients)
        if call.observer is not None:
            gradients = call.observer.after_backward(gradients) or gradients
        inputs = tuple(
            None if g is None else g[:rows].clone() for g, rows in zip(gradients.inputs, call.input_rows, strict=True)
        )
        parameters = sinks.hand_over(gradients.parameters, ctx)
        call.release()
        # An autograd graph may outlive its step, and garbage collection does not look into it: megatron-core's token
        # dispatchers keep the probabilities of the last microbatch, and with them all of its nodes.
        ctx.call = None
        return None, *inputs, *parameters


def want_gradients(inputs: Iterable[Tensor | None]) -> bool:
    """Return whether autograd would compute a gradient for one of these inputs now."""
    if torch.is_grad_enabled():
        for tensor in inputs:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
