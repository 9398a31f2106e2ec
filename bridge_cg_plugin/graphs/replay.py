"""Replaying a recording as one node of the autograd graph."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .gradients import GradientSinks
from .program import Bucket, RegionProgram
from .recording import Gradients, Mode
from .rows import copies, write_each
from .slot import Lease, Slot


class BackwardObserver(Protocol):
    """Watches the backward of one replayed microbatch."""

    def before_backward(self, output_gradients: Sequence[Tensor | None]) -> None:
        """Called before the backward is replayed, with the gradients of the real rows."""

    def after_backward(self, gradients: Gradients) -> None:
        """Called when it was replayed, before any gradient hook fires."""


def replay(
    program: RegionProgram,
    sinks: GradientSinks,
    slot: Slot,
    bucket: Bucket,
    mode: Mode,
    batch: Any,
    observer: BackwardObserver | None = None,
) -> tuple[Tensor, ...]:
    """Load the batch into the slot's buffers and replay; returns copies of the outputs' real rows."""
    lease = slot.take()
    try:
        program.load(slot.buffers[bucket], batch)
        rows = program.output_rows(batch)
        if not mode.gradients:
            outputs = _forward(slot, bucket, mode, rows)
            lease.release()
            return outputs
        inputs = program.differentiable_inputs(batch)
        receivers = sinks.receivers()
        call = _Call(lease, sinks, receivers, bucket, mode, rows, tuple(len(t) for t in inputs), observer)
        return _Replay.apply(call, *inputs, *receivers)
    except BaseException:
        lease.release()
        raise


def _forward(slot: Slot, bucket: Bucket, mode: Mode, rows: tuple[int, ...]) -> tuple[Tensor, ...]:
    recording = slot.recordings[bucket, mode]
    recording.forward()
    return copies(recording.outputs, rows)


class _Call:
    """What the backward of one replay needs besides tensors."""

    __slots__ = ("bucket", "input_rows", "lease", "mode", "observer", "receivers", "rows", "sinks")

    def __init__(
        self,
        lease: Lease,
        sinks: GradientSinks,
        receivers: tuple[Tensor, ...],
        bucket: Bucket,
        mode: Mode,
        rows: tuple[int, ...],
        input_rows: tuple[int, ...],
        observer: BackwardObserver | None,
    ) -> None:
        self.lease, self.sinks, self.receivers, self.bucket, self.mode = lease, sinks, receivers, bucket, mode
        self.rows, self.input_rows, self.observer = rows, input_rows, observer


class _Replay(Function):
    @staticmethod
    def forward(ctx, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        call.sinks.expect(ctx, call.receivers)
        return _forward(call.lease.slot, call.bucket, call.mode, call.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, *output_gradients: Tensor | None):
        call: _Call = ctx.call
        slot = call.lease.slot
        call.lease.check()
        slot.order_after_last_use()
        if call.observer is not None:
            call.observer.before_backward(output_gradients)
        write_each(slot.output_gradients[call.bucket], output_gradients)
        gradients = slot.recordings[call.bucket, call.mode].backward()
        if call.observer is not None:
            call.observer.after_backward(gradients)
        inputs = tuple(
            None if g is None else g[:rows].clone() for g, rows in zip(gradients.inputs, call.input_rows, strict=True)
        )
        parameters = call.sinks.hand_over(gradients.parameters, call.receivers, ctx)
        call.lease.release()
        return None, *inputs, *parameters
