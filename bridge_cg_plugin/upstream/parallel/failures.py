"""Which rank of a job an error ends, and what it was doing."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed

from ...announce import warn
from ...graphs.errors import named


def several_ranks() -> bool:
    """Whether this process is one of several of a job."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


@contextmanager
def named_failure(doing: str) -> Iterator[None]:
    """Warn with the rank that an error ends and what it was doing; alone, a process needs no name.

    The other ranks wait in their next collective until NCCL's time-out ends them; this line names what they wait for.
    """
    try:
        yield
    except Exception as error:
        if several_ranks():
            warn(f"this rank ends in {doing}: {named(error)}")
        raise
