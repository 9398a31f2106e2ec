"""Interleaved pipelines: Qwen3-VL's providers get the virtual stage that they build and do not pass it to their model.

The model takes `vp_stage` and megatron-core refuses to number layers without it, so as released no interleaved pipeline
of Qwen3-VL can be built. Qwen3.5-VL's providers pass it on.
"""

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from ..seams.patches import Patch, arguments_of
from ..seams.registry import seam
from ..seams.registry.models import DROPS_STAGE, MODEL_OF_PROVIDER
from ..seams.seam import Seam
from ..wrappers import overridden

STAGE = "vp_stage"


def _tells_stage(entry: Seam) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes a module's `provide` build the model of the virtual stage that it was asked for."""

    def make(old: Callable[..., Any]) -> Callable[..., Any]:
        argument = arguments_of(entry, old)

        @functools.wraps(old)
        def provide(*args: Any, **kwargs: Any) -> Any:
            stage = argument(STAGE, args, kwargs)
            if stage is None:
                return old(*args, **kwargs)
            owner = sys.modules[entry.module]
            model = getattr(owner, MODEL_OF_PROVIDER)
            with overridden(owner, MODEL_OF_PROVIDER, functools.partial(model, **{STAGE: stage})):
                return old(*args, **kwargs)

        return provide

    return make


def _drops_stage(old: Callable[..., Any]) -> bool:
    """Whether a `provide` passes its stage to nothing: no call in it has a keyword of that name."""
    code = getattr(old, "__code__", None)
    return isinstance(code, CodeType) and not any(isinstance(c, tuple) and STAGE in c for c in code.co_consts)


PATCHES = tuple(
    Patch(entry, _tells_stage(entry), needed=_drops_stage)
    for entry in (seam(f"{model.provider}.provide") for model in DROPS_STAGE)
)
