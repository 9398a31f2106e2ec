"""Qwen3-VL models of loops that say that lengths vary, as verl does: packed graphs take packs of any length.

Upstream's model refuses `variable_seq_lengths` beside any language-model graphs, for its own have one length.
"""

import functools
from collections.abc import Callable
from typing import Any

from ...options import packed_options
from ...options.language_model import IMPL
from ..seams.patches import Patch
from ..seams.registry import seam
from ..wrappers import overridden


def _with_packed_graphs(old: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(old)
    def expose(self: Any) -> None:
        config = getattr(self.language_model, "config", None)
        if getattr(config, IMPL, None) != "transformer_engine" or not packed_options(config).enabled:
            return old(self)
        with overridden(config, "variable_seq_lengths", False):
            return old(self)

    return expose


PATCHES = (Patch(seam("variable_lengths"), _with_packed_graphs),)
