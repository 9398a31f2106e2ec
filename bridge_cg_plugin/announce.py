"""Messages for the person who watches a training run: rank 0 prints, every rank logs."""

import logging
import sys

LOGGER = logging.getLogger("bridge_cg_plugin")


def rank() -> int:
    """Return this process's rank, 0 outside distributed runs."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0
    number: int = torch.distributed.get_rank()
    return number


def announce(message: str) -> None:
    """Print a line or a block on rank 0."""
    if rank() == 0:
        print("\n".join(f"[bridge-cg] {line}" for line in message.splitlines()), flush=True)


def warn(message: str) -> None:
    """Log a warning with the rank it comes from.

    As an error: Bridge drops what any logger reports as a warning (`logger.filter_warnings`, on by default).
    """
    LOGGER.error("[rank %d] %s", rank(), message)
