"""Patch of Bridge's Qwen3-VL vision model: it never pads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from ..seams.patches import Patch
from ..seams.registry import seam

PADDING_SWITCH = seam("vision_padding_switch").target.rpartition(".")[2]
_ONE_THREAD = Lock()


def _never_pads(old: Callable[..., Any]) -> Callable[..., Any]:
    """Upstream's own padding and masking for graphs drops the attention boundaries: forward never takes that path."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _not_padding(self):
            return old(self, *args, **kwargs)

    return forward


class _No:
    """Answers the model's question whether to pad, for all its passes that are under way in some thread."""

    passes = 0

    def __call__(self) -> bool:
        return False


@contextmanager
def _not_padding(model: Any) -> Iterator[None]:
    with _ONE_THREAD:
        no = vars(model).setdefault(PADDING_SWITCH, _No())
        no.passes += 1
    try:
        yield
    finally:
        with _ONE_THREAD:
            no.passes -= 1
            if not no.passes:
                del vars(model)[PADDING_SWITCH]


PATCHES = (Patch(seam("vision_padding"), _never_pads),)
