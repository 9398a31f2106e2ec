"""How long an encoder's forward passes take on the GPU, eager or replayed, from one call to its return."""

import functools
from typing import Any

import torch
from torch import nn


class EncoderClock:
    """Takes the times of one encoder's calls.

    The call of the module's class is replaced, not a forward or a hook: graphs do not run where somebody has hooks.

    Args:
        encoder: The encoder.
    """

    def __init__(self, encoder: nn.Module) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        kind: Any = type(encoder)
        old = kind.__call__

        @functools.wraps(old)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module is not encoder or torch.cuda.is_current_stream_capturing():
                return old(module, *args, **kwargs)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            found = old(module, *args, **kwargs)
            last.record()
            self._spans.append((first, last))
            return found

        kind.__call__ = call

    def read(self) -> float:
        """Return the ms of all calls since the last time; the GPU must have finished them."""
        taken = float(sum(first.elapsed_time(last) for first, last in self._spans))
        self._spans.clear()
        return taken
