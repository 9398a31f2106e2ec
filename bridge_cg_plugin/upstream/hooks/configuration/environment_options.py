"""Graph options of the environment: whatever a configuration sets wins."""

import dataclasses
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ....announce import announce
from ....options import OptionError, normalize
from ....options.facts import facts_of
from ....options.groups import tuning_of
from ....options.language_model import LANGUAGE_MODEL
from ....options.migration import SWITCHES
from ....options.sources import SETTINGS, Written, collect, fields_of, set_together
from ....options.values import is_unset
from ...environment import OPTIONS
from .graph_fields import apply_options
from .provider_fields import EVERY


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


WARMUP = "cuda_graph_warmup_steps"
# What Bridge's recipes write while graphs of the language model are off.
_IDLE = ("none", "full", False)


def apply_environment(config: Any) -> bool:
    """Set the options of the environment on fields of the model that have their default values; returns whether it did.

    Fields that the model does not have are left out, as one variable is for every model of a job.

    Args:
        config: A Bridge `ConfigContainer`.

    Raises:
        OptionError: The variable has a word that is no option, or its options cannot work with the configuration.
    """

    def apply(fields: dict[str, Any], steps: dict[str, int]) -> None:
        apply_options(normalize(collect_for_start(config), Written(fields))[0], config)
        for name, value in steps.items():
            setattr(config.model, name, value)

    return hasattr(config, "model") and take_environment(config.model, apply)


def take_environment(model: Any, apply: Callable[[dict[str, Any], dict[str, int]], None]) -> bool:
    """Have the options of the environment applied that a model's config leaves at their default values.

    Args:
        model: The config.
        apply: Sets graph fields, and warm-up steps, by name.

    Returns:
        Whether there were any.

    Raises:
        OptionError: The variable has a word that is no option, or its options cannot work with the config.
    """
    words = os.environ.get(OPTIONS)
    if not words:
        return False
    try:
        return _take(model, collect(words), apply)
    except OptionError as error:
        error.add_note(f"The environment variable {OPTIONS} says so.")
        raise


def _take(model: Any, said: Written, apply: Callable[[dict[str, Any], dict[str, int]], None]) -> bool:
    kept = _explicit_fields(model)
    known = [name for name in said.fields if hasattr(model, tuning_of(name) or name)]
    taken = {name: said.fields[name] for name in known if kept.isdisjoint(set_together(name))}
    warm_up = facts_of(said).warmup_steps
    steps = {} if warm_up is None or WARMUP in kept else {WARMUP: warm_up}
    if not taken and not steps:
        return False
    apply(taken, steps)
    left = [name for name in known if name not in taken]
    announce(f"{OPTIONS} sets {_listed({**taken, **steps})}" + (f"; set already: {', '.join(left)}" if left else ""))
    return True


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _explicit_fields(model: Any) -> set[str]:
    """Return the graph fields, and keys of mappings, that have other values than their defaults."""
    defaults = {**EVERY, **dict(_defaults(dataclasses.fields(model) if dataclasses.is_dataclass(model) else ()))}
    held = {**fields_of(model), WARMUP: getattr(model, WARMUP, None)}
    return {name for name, value in held.items() if not is_unset(value) and not _is_default(name, value, defaults)}


def _is_default(name: str, value: Any, defaults: dict[str, Any]) -> bool:
    if name in (*LANGUAGE_MODEL.names, *SWITCHES) and (value in _IDLE or not value):
        return True
    return name in defaults and (value == defaults[name] or (not value and not defaults[name]))


def _defaults(fields: Iterable[dataclasses.Field[Any]]) -> Iterable[tuple[str, Any]]:
    for one in fields:
        if one.default is not dataclasses.MISSING:
            yield one.name, one.default
        elif one.default_factory is not dataclasses.MISSING:
            yield one.name, one.default_factory()
