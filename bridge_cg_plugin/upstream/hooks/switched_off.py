"""With the plugin switched off: one line for a model that asks for its graphs. Nothing else is patched then."""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...announce import Told, announce, warn
from ...options.graph_options import SETTING
from ...options.normalization import VISION_IMPL
from ...options.packed import MAX_PACKED_SEQS
from ...options.sources import misspelt
from ...switches import PLUGIN
from ..environment import OPTIONS
from ..seams.patches import Patch
from ..seams.registry import seam
from ..seams.registry.bridge import SCHEDULES

_told = Told()


def _tell(config: Any) -> None:
    """Print once that nothing of a model is on graphs, where its config or the environment asks for them."""
    if config is None or not _told.is_new(config):
        return
    names = (name for name in (SETTING, VISION_IMPL, MAX_PACKED_SEQS) if getattr(config, name, None))
    asked = {name: getattr(config, name) for name in names} | {OPTIONS: os.environ.get(OPTIONS)}
    said = ", ".join(f"{name}={value}" for name, value in asked.items() if value not in (None, "", "none", "off"))
    if said:
        announce(f"graphs: none of bridge_cg_plugin's, which is off ({PLUGIN}={os.environ.get(PLUGIN)}). Asked: {said}")
    for name, meant in misspelt(config).items():
        warn(f"{name} of the model's configuration is no field. Did you mean {meant}, with {PLUGIN}=1?")


def _of_bridge(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(old)
    def validate(self: Any, *args: Any, **kwargs: Any) -> Any:
        _tell(self.model)
        return old(self, *args, **kwargs)

    return validate


def _of_a_loop(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(old)
    def schedule(*, model: Any, **others: Any) -> Any:
        from ..wrappers import config_of

        _tell(config_of(model))
        return old(model=model, **others)

    return schedule


def _observed(name: str, make: Callable[[Any], Any]) -> Patch:
    purpose = "a model that asks for graphs is told that the plugin is off; upstream's code runs"
    return Patch(replace(seam(name), purpose=purpose), make)


PATCHES = (
    _observed("config_check", _of_bridge),
    *(_observed(name, _of_a_loop) for name in SCHEDULES),
)
