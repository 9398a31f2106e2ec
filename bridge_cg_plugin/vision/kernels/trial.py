"""What is tried on the device before recordings call it."""

from collections.abc import Callable

import torch

from ...graphs.errors import CaptureError, named


def refuse_capture(what: str) -> None:
    """Refuse what must come before a capture.

    Args:
        what: What would be done.

    Raises:
        CaptureError: A capture is under way.
    """
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(f"{what} for the first time inside a capture")


def tried(what: str, check: Callable[[], str]) -> str:
    """Return why something cannot be used, nothing where it can.

    Args:
        what: Its name.
        check: Tries it; returns the reason, or raises it.

    Raises:
        CaptureError: A capture is under way.
    """
    refuse_capture(f"{what} would be tried")
    try:
        return check()
    except Exception as error:  # of a compiler: anything
        return named(error)
