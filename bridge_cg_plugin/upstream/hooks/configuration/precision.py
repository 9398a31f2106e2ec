"""Mixed precision, which Bridge's start sets on the model: what graphs can do depends on it before that, too."""

from dataclasses import replace
from typing import Any

from ....options.sources import SETTINGS, Written, collect


def collect_for_start(config: Any) -> Written:
    """Return what a configuration holds as `collect` does, with the precision that Bridge's start will set.

    Args:
        config: A Bridge `ConfigContainer`, or a model's config object.
    """
    held = collect(config)
    precision = _named(getattr(config, "mixed_precision", None))
    settings = {name: getattr(precision, name) for name in SETTINGS if hasattr(precision, name)}
    return replace(held, settings={**held.settings, **settings})


def _named(precision: Any) -> Any:
    """Return the settings that a name stands for; None if Bridge has no such name, which it refuses itself."""
    if not isinstance(precision, str):
        return precision
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    try:
        return get_mixed_precision_config(precision)
    except ValueError:
        return None
