"""An executor with the semantics of CUDA graphs on a CPU.

It records the operations of one pass and runs these again over the same memory, as a graph does: no Python of the model
runs in a replay, so whatever a program reads outside of its buffers stays as it was. The reference executor runs the
program again and cannot show that. Memory that a tensor has left is noticed before it is touched. Memory that nothing
wrote holds NaN, where a graph's holds anything.
"""

from contextlib import nullcontext
from functools import cache

from torch import Tensor, nan, no_grad, ops
from torch.utils._python_dispatch import TorchDispatchMode

from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor

UNWRITTEN = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}


class MemoryMoved(AssertionError):
    """A replay would touch memory that a tensor has left."""


@cache
def results_of(func) -> tuple[bool, bool]:
    """Return whether an operation returns views of its arguments only, and arguments that it wrote to only."""
    aliases = [result.alias_info for result in func._schema.returns]
    shared = bool(aliases) and None not in aliases
    return shared and not any(a.is_write for a in aliases), shared and all(a.is_write for a in aliases)


def tensors(value) -> list[Tensor]:
    """Return the tensors among what an operation takes or returns."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return tensors(tuple(value.values())) if isinstance(value, dict) else []


class Tape(TorchDispatchMode):
    """The operations that reach PyTorch's kernels inside, with where their tensors lay."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is ops.aten._local_scalar_dense.default:
            raise RuntimeError("a value is read on the host while a graph is captured")
        made = func(*args, **kwargs)
        is_view, in_place = results_of(func)
        if not is_view:
            places = [(tensor, tensor.data_ptr()) for tensor in tensors((args, kwargs))]
            self._calls.append((func, args, kwargs, [] if in_place else tensors(made), places))
        return made

    def made(self) -> list[Tensor]:
        """Return what the operations made, which lies in a graph's own memory."""
        return [tensor for _, _, _, made, _ in self._calls for tensor in made]

    @no_grad()
    def replay(self) -> None:
        """Run the operations again; what they made before is overwritten."""
        for func, args, kwargs, made, places in self._calls:
            for tensor, address in places:
                if tensor.data_ptr() != address:
                    raise MemoryMoved(f"{func} was recorded at {address:#x}, its tensor is at {tensor.data_ptr():#x}")
            fresh = func(*args, **kwargs)
            for old, new in zip(made, tensors(fresh) if made else (), strict=True):
                if old.numel() and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
                if old.is_floating_point() and func.overloadpacket._qualified_op_name in UNWRITTEN:
                    old.fill_(nan)


class Replayed:
    """Replays what was recorded of a forward and a backward."""

    def forward(self) -> None:
        self._forward.replay()

    def backward(self):
        self._backward.replay()
        return self._gradients


class TapeRecording(Replayed):
    """A forward and a backward on tape."""

    def __init__(self, body, isolated=nullcontext) -> None:
        self._body, self._isolated = body, isolated
        self._forward, self._backward, self._gradients = Tape(), Tape(), None
        with isolated(), self._forward:
            self.outputs = body.forward()
            body.activations.join()

    def record_backward(self) -> None:
        if self._body.has_backward:
            with self._isolated(), self._backward:
                self._gradients = self._body.backward()
        self._body.forget()

    def made(self) -> list[Tensor]:
        """Return what lies in the graphs' own memory."""
        return [*self._forward.made(), *self._backward.made()]


class TapeExecutor(ReferenceExecutor):
    """Records on tape. Outputs of a recording hold finite values before its first replay, as in a graph."""

    name = "tape"

    def record_forward(self, body, pool):
        return TapeRecording(body, self.isolated)


class CountingTape(TapeExecutor):
    """Counts what it records."""

    recorded = 0

    def record_forward(self, body, pool):
        self.recorded += 1
        return super().record_forward(body, pool)
