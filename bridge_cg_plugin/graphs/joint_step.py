"""One training step of all modules of a rank."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from .manager import GraphManager


@contextmanager
def joint_step(modules: Sequence[GraphManager]) -> Iterator[None]:
    """Be in a training step of several modules, before which one of them at most records something.

    Each step begins with another module, so that none waits until the others have all that they want. A module that
    other ranks share leaves its turn to the next one only where that has the same ranks: these know that it did.

    Args:
        modules: The modules, in the same order on ranks that share their layers.
    """
    first = modules[0].step_number % len(modules) if modules else 0
    alike = len({graphs.bucket_consensus.ranks for graphs in modules}) == 1
    may_record = True
    with ExitStack() as stack:
        for graphs in (*modules[first:], *modules[:first]):
            stack.enter_context(graphs.step(may_record))
            may_record &= alike and not graphs.recorded
        yield
