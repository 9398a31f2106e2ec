"""One training step of all modules of a rank, or one evaluation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from .manager import GraphManager


@contextmanager
def joint_step(modules: Sequence[GraphManager]) -> Iterator[None]:
    """Be in a training step of several modules, before which one of them at most records something.

    Args:
        modules: The modules, in the same order on ranks that share their layers.
    """
    with ExitStack() as stack:
        in_turn(modules, lambda graphs, may_record: stack.enter_context(graphs.step(may_record)))
        yield


def before_evaluation(modules: Sequence[GraphManager]) -> None:
    """Note that forward passes without a backward follow; one of several modules at most records for the last ones.

    Args:
        modules: See `joint_step`.
    """
    in_turn([graphs for graphs in modules if not graphs.in_step], GraphManager.before_evaluation)


def in_turn(modules: Sequence[GraphManager], begin: Callable[[GraphManager, bool], None]) -> None:
    """Let modules begin, each time with another one first, so that none waits until the others have all they want.

    A module that other ranks share leaves its turn to the next one only where that has the same ranks: these know that
    it did.

    Args:
        modules: See `joint_step`.
        begin: Called with each module and whether it may record.
    """
    first = modules[0].turn % len(modules) if modules else 0
    alike = len({graphs.bucket_consensus.ranks for graphs in modules}) == 1
    may_record = True
    for graphs in (*modules[first:], *modules[:first]):
        begin(graphs, may_record)
        may_record &= alike and not graphs.recorded
