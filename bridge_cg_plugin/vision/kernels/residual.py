"""The residual stream's gradient, added where LayerNorm's backward ends instead of in a kernel of its own.

A tensor of the residual stream is read twice: by a LayerNorm and, as the residual, by the addition at the end of the
branch that begins there. In the backward the addition comes first. It leaves its gradient here; the LayerNorm's
backward takes it along, rounds as autograd's addition would, and computes the sum over tokens of its result, which
is the bias gradient of the addition before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from ...graphs.recordings.recording import saved_address

REMEDY = 'set vision_cuda_graph_kernels="exact"'


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch of the residual stream that begins with a LayerNorm.

    Attributes:
        place: Where the tensor lies that LayerNorm reads, and its weight: other norms may read the same tensor.
        may_wait: Whether the sums of its parameters' gradients can wait.
    """

    place: tuple[int, int]
    may_wait: Callable[[], bool]


class ResidualStream:
    """Brings the gradients of a branch's two ends together during one recorded forward or backward."""

    def __init__(self) -> None:
        self._begun: tuple[Tensor, Branch] | None = None
        self._gradients: dict[tuple[int, int], tuple[Branch, Tensor]] = {}
        self._sums: dict[int, tuple[Tensor, int, Tensor]] = {}

    def begin(self, x: Tensor, weight: Tensor, may_wait: Callable[[], bool]) -> None:
        """Note in a forward that the LayerNorm of this weight reads x."""
        self._begun = x, Branch((saved_address(x), weight.data_ptr()), may_wait)

    def end(self, residual: Tensor) -> Branch | None:
        """Return the branch that ends with an addition to `residual`; None where no LayerNorm read that last."""
        begun, self._begun = self._begun, None
        return begun[1] if begun is not None and begun[0] is residual else None

    def leave(self, branch: Branch, gradient: Tensor) -> None:
        """Leave the residual's gradient for the LayerNorm's backward.

        Raises:
            RuntimeError: Another one waits there, which would be lost.
        """
        if branch.place in self._gradients:
            raise RuntimeError(f"two branches begin with one LayerNorm of the same tensor; {REMEDY}")
        self._gradients[branch.place] = (branch, gradient)

    def take(self, x: Tensor, weight: Tensor) -> tuple[Branch, Tensor] | None:
        """Return the branch and the gradient that were left for the LayerNorm of this weight that read x."""
        return self._gradients.pop((saved_address(x), weight.data_ptr()), None)

    def know(self, gradient: Tensor, total: Tensor) -> None:
        """Keep the sum over tokens of a gradient; holding the gradient keeps autograd from adding to it in place."""
        self._sums[gradient.data_ptr()] = gradient, gradient._version, total

    def sum_of(self, gradient: Tensor) -> Tensor | None:
        """Return the sum over tokens of a gradient, if it is known and the gradient is still what was added up."""
        known = self._sums.pop(gradient.data_ptr(), None)
        if known is None:
            return None
        summed, version, total = known
        same = summed.numel() == gradient.numel() and total.numel() == gradient.shape[-1]
        return total if same and summed._version == version else None

    def check(self) -> None:
        """Make sure that no gradient was left behind.

        Raises:
            RuntimeError: A LayerNorm's backward did not come, so gradients are wrong.
        """
        if self._gradients:
            raise RuntimeError(
                f"{len(self._gradients)} residual gradients were never added: LayerNorm's backward did not run, or ran "
                f"on a copy of its input; {REMEDY}"
            )


# Set while work is recorded. Autograd calls a backward in a thread of its own, so a context variable would not do.
_stream: ResidualStream | None = None


@contextmanager
def residual_stream() -> Iterator[ResidualStream]:
    """Let additions leave the residual's gradient to LayerNorm's backward inside."""
    global _stream
    before, _stream = _stream, ResidualStream()
    try:
        yield _stream
        _stream.check()
    finally:
        _stream = before


def current_stream() -> ResidualStream | None:
    """Return the stream of the work that is recorded now; None where each gradient is added by autograd."""
    return _stream
