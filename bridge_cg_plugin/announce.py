"""Messages for the person who watches a training run: rank 0 prints, every rank logs."""

import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

LOGGER = logging.getLogger("bridge_cg_plugin")
PREFIX = "[bridge-cg] "
# Characters of a message that a terminal of 80 columns holds beside the prefix.
WIDTH = 80 - len(PREFIX)
# What launchers tell a process of its rank.
_LAUNCHED = ("RANK", "SLURM_PROCID")


def rank() -> int:
    """Return this process's rank, by its launcher until the ranks are connected; 0 outside distributed runs."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return next((int(told) for name in _LAUNCHED if (told := os.environ.get(name, "")).isdecimal()), 0)
    number: int = torch.distributed.get_rank()
    return number


class Told:
    """What was said last of each object. Nothing is written on it; one that takes weak references may go."""

    def __init__(self) -> None:
        self._said: dict[int, tuple[Callable[[], Any], str]] = {}

    def is_new(self, owner: Any, message: str = "") -> bool:
        """Whether something else, or nothing, was said of an object; notes the message."""
        known, said = self._said.get(id(owner), (lambda: None, ""))
        if known() is owner and said == message:
            return False
        try:
            self._said[id(owner)] = weakref.ref(owner), message
        except TypeError:
            self._said[id(owner)] = lambda: owner, message
        return True


def announce(message: str) -> None:
    """Print a line or a block on rank 0."""
    if rank() == 0:
        print("\n".join(f"{PREFIX}{line}" for line in message.splitlines()), flush=True)


@functools.cache
def announce_once(message: str) -> None:
    """Print it unless this process has."""
    announce(message)


def warn(message: str) -> None:
    """Log a warning with the rank it comes from.

    As an error: Bridge drops what any logger reports as a warning (`logger.filter_warnings`, on by default).
    """
    LOGGER.error("[rank %d] %s", rank(), message)


SAID: set[str] = set()


def warn_once(message: str, said: set[str] = SAID) -> None:
    """Log a warning unless it is among those that were said, by default in this process, and note it there."""
    if message not in said:
        said.add(message)
        warn(message)
