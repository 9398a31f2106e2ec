"""megatron-core's activation offloading in Qwen3-VL's language model.

Bridge's `forward` of it stands in for megatron-core's and leaves out the call that notifies offloading of a new
microbatch: as released the options are accepted and nothing is ever offloaded.
"""

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

from ..seams.patches import Patch
from ..seams.registry import seam

_BEGINS = seam("offload_begins").target.rpartition(".")[2]


def _telling(old: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `forward` that first notifies offloading of the microbatch."""

    @functools.wraps(old)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config.fine_grained_activation_offloading:
            getattr(self, _BEGINS)()
        return old(self, *args, **kwargs)

    return forward


def _tells_nothing(old: Callable[..., Any]) -> bool:
    """Whether a `forward` leaves the call out."""
    code = getattr(old, "__code__", None)
    return isinstance(code, CodeType) and _BEGINS not in code.co_names


PATCHES = (Patch(seam("language_model_offload"), _telling, needed=_tells_nothing),)
