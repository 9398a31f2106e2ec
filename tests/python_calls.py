"""What something costs the host, counted: calls from Python, whatever a machine's speed and load."""

import gc
import sys
from collections.abc import Callable
from typing import Any


def python_calls(run: Callable[[], Any]) -> int:
    """Return how many functions, Python's and C's, are called from Python; none of a garbage collection's callbacks."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    collecting = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        if collecting:
            gc.enable()
    return count
