"""Replaying a recording as one node of the autograd graph."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import Function

from ..changes.source import Recorded, Source
from ..errors import ReplayError
from ..planning.buckets import Bucket
from ..program import RegionProgram
from ..recordings.recording import Gradients
from ..reports import ranges
from ..reports.ranges import named_range
from ..rows import copies, write_each
from .pending import WILL_RUN
from .slot import Lease, Slot, second_backward


class BackwardObserver(Protocol):
    """Watches the backward of one replayed microbatch."""

    def before_backward(self, output_gradients: Sequence[Tensor | None]) -> None:
        """Called before the backward is replayed, with the gradients of the real rows."""

    def after_backward(self, gradients: Gradients) -> None:
        """Called when it was replayed, before any gradient hook fires."""


def replay(
    program: RegionProgram,
    source: Source,
    recorded: Recorded,
    slot: Slot,
    bucket: Bucket,
    gradients: bool,
    batch: Any,
    holds: Callable[[Source], bool],
    observer: BackwardObserver | None = None,
) -> tuple[Tensor, ...]:
    """Load a batch into the slot's buffers and replay; returns copies of the outputs' real rows.

    Args:
        program: The region's.
        source: What the recording was made from.
        recorded: The recording.
        slot: The slot that it was made in; free.
        bucket: What it was made for.
        gradients: Whether a backward may follow.
        batch: The microbatch.
        holds: Whether a source still lies where it was recorded; asked before the backward is launched.
        observer: Watches the backward.
    """
    lease = slot.take()
    try:
        program.load(slot.buffers[bucket], batch)
        rows = program.output_rows(batch)
        if not gradients:
            outputs = _forward(recorded, rows)
            lease.release()
            return outputs
        if slot.common is not None and recorded.turn is not None:
            slot.common.begins(recorded.turn, lease)
        inputs = program.differentiable_inputs(batch)
        receivers = source.sinks.receivers()
        input_rows = tuple(len(t) for t in inputs)
        call = _Call(lease, source, recorded, receivers, rows, input_rows, program.name, holds, observer)
        return _apply(call, *inputs, *receivers)
    except BaseException:
        lease.release()
        raise


def replay_in_range(
    program: RegionProgram, source: Source, recorded: Recorded, slot: Slot, bucket: Bucket, *args: Any
) -> tuple[Tensor, ...]:
    """Do what `replay` does, in a range of the profile."""
    with named_range(f"replay {program.name}, bucket {bucket}"):
        return replay(program, source, recorded, slot, bucket, *args)


def _backward_in_range(call: "_Call") -> Gradients:
    with named_range(f"replay {call.name}, backward"):
        return call.recorded.recording.backward()


def _forward(recorded: Recorded, rows: tuple[int, ...]) -> tuple[Tensor, ...]:
    recorded.recording.forward()
    return copies(recorded.recording.outputs, rows)


@dataclass(slots=True)
class _Call:
    """What the backward of one replay needs besides tensors."""

    lease: Lease
    source: Source
    recorded: Recorded
    receivers: tuple[Tensor, ...]
    rows: tuple[int, ...]
    input_rows: tuple[int, ...]
    name: str
    holds: Callable[[Source], bool]
    observer: BackwardObserver | None


class _Replay(Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        call.source.sinks.expect(ctx, call.receivers)
        return _forward(call.recorded, call.rows)

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return _Replay._backward(ctx, output_gradients)
        receivers = () if ctx.call is None else ctx.call.receivers
        with torch.no_grad():
            gradients = _Replay._backward(ctx, output_gradients)
        return _undifferentiable(gradients, (*receivers, *output_gradients))

    @staticmethod
    def _backward(ctx: Any, output_gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        call: _Call | None = ctx.call
        if call is None:
            raise second_backward()
        slot = call.lease.slot
        call.lease.check()
        if not call.holds(call.source):
            raise ReplayError(
                f"{call.name}: between the forward and the backward of a graphed microbatch, memory of parameters or "
                "of their main_grad was moved or freed, a parameter was frozen or unfrozen, or a hook was put on one; "
                "do it between steps"
            )
        if slot.common is not None:
            slot.common.ends(call.lease)
        slot.order_after_last_use()
        if call.observer is not None:
            call.observer.before_backward(output_gradients)
        _write(call, output_gradients)
        sinks = call.source.sinks
        partial = not WILL_RUN(sinks.anchor_node)
        before = sinks.set_aside() if partial else ()
        try:
            recorded = _backward_in_range(call) if ranges.on else call.recorded.recording.backward()
            gradients = recorded.through(output_gradients)
            if call.observer is not None:
                call.observer.after_backward(gradients)
            inputs = tuple(
                None if g is None else g[:rows].clone()
                for g, rows in zip(gradients.inputs, call.input_rows, strict=True)
            )
            parameters = sinks.hand_over(gradients.parameters, call.receivers, ctx, partial)
        finally:
            if partial:
                sinks.put_back(before)
        call.lease.release()
        # An autograd graph may outlive its step, and garbage collection does not look into it: megatron-core's token
        # dispatchers keep the probabilities of the last microbatch, and with them all of its nodes.
        ctx.call = None
        return None, *inputs, *parameters


def _apply(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Call `_Replay.apply` without its look for dead functorch wrappers, 0.2 ms for the parameters of an encoder."""
    apply = _Replay.apply if torch._C._are_functorch_transforms_active() else super(Function, _Replay).apply
    replayed: tuple[Tensor, ...] = apply(call, *tensors)
    return replayed


def _write(call: _Call, output_gradients: Sequence[Tensor | None]) -> None:
    """Write gradients of the real rows into the recording's buffers."""
    try:
        write_each(call.recorded.output_gradients, output_gradients)
    except RuntimeError as error:
        if any(gradient is not None and _is_batch(gradient) for gradient in output_gradients):
            raise ReplayError(
                f"{call.name}: a graphed microbatch has one backward, for one gradient, not for a batch of them "
                "(is_grads_batched=True, vectorize=True or torch.func.vmap); run such a microbatch eager"
            ) from error
        raise


def _is_batch(gradient: Tensor) -> bool:
    return is_legacy_batchedtensor(gradient) or is_batchedtensor(gradient)


class _Undifferentiable(Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        raise ReplayError(
            "the gradients of a graphed microbatch cannot be differentiated (create_graph=True keeps an autograd "
            "graph, a CUDA graph has none); run such a microbatch eager"
        )


def _undifferentiable(
    gradients: Sequence[Tensor | None], depends_on: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return gradients that raise where they are differentiated: as constants they would drop out silently."""
    there = [gradient for gradient in gradients if gradient is not None]
    marked = iter(_Undifferentiable.apply(len(there), *there, *depends_on) if there else ())
    return tuple(None if gradient is None else next(marked) for gradient in gradients)


def want_gradients(inputs: Iterable[Tensor | None]) -> bool:
    """Return whether autograd would compute a gradient for one of these inputs now."""
    if torch.is_grad_enabled():
        for tensor in inputs:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
