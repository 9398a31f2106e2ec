"""An executor with the semantics of CUDA graphs on a CPU.

It records the operations of one pass and runs these again over the same memory, as a graph does: no Python of the model
runs in a replay, so whatever a program reads outside of its buffers stays as it was. The reference executor runs the
program again and cannot show that. Memory that a tensor has left is noticed before it is touched.
"""

from torch import Tensor, no_grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bridge_cg_plugin.graphs.executor import ReferenceExecutor


class MemoryMoved(AssertionError):
    """A replay would touch memory that a tensor has left."""


class Tape(TorchDispatchMode):
    """The operations that reach PyTorch's kernels inside, with where their tensors lay."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        aliases = [result.alias_info for result in func._schema.returns]
        if not aliases or not all(alias is not None and not alias.is_write for alias in aliases):  # no mere view
            places = [(t, t.data_ptr()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            in_place = bool(aliases) and all(alias is not None and alias.is_write for alias in aliases)
            self._calls.append((func, args, kwargs, [] if in_place else tree_leaves(made), places))
        return made

    @no_grad()
    def replay(self) -> None:
        """Run the operations again; what they made before is overwritten."""
        for func, args, kwargs, made, places in self._calls:
            for tensor, address in places:
                if tensor.data_ptr() != address:
                    raise MemoryMoved(f"{func} was recorded at {address:#x}, its tensor is at {tensor.data_ptr():#x}")
            fresh = func(*args, **kwargs)
            for old, new in zip(made, tree_leaves(fresh) if made else (), strict=True):
                if isinstance(old, Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeRecording:
    """A forward and a backward on tape."""

    def __init__(self, body) -> None:
        self._body = body
        self._forward, self._backward, self._gradients = Tape(), Tape(), None
        with self._forward:
            self.outputs = body.forward()
            body.join()
        if body.has_backward:
            with self._backward:
                self._gradients = body.backward()
        body.forget()

    def forward(self) -> None:
        self._forward.replay()

    def backward(self):
        self._backward.replay()
        return self._gradients


class TapeExecutor(ReferenceExecutor):
    """Records on tape. Outputs of a recording hold finite values before its first replay, as in a graph."""

    name = "tape"

    def record(self, body, pool):
        with self.isolated():
            return TapeRecording(body)
