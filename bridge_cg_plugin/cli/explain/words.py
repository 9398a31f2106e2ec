"""Hydra-style words set on a configuration that Hydra cannot hold, since some of its values are stand-ins."""

from collections.abc import Sequence
from typing import Any

from bridge_cg_plugin.options import OptionError


def set_words(config: Any, words: Sequence[str]) -> None:
    """Set fields of a Bridge `ConfigContainer`. Values with interpolations are left out.

    Args:
        config: The configuration.
        words: `section.name=value`, whose names exist as far as classes say; `~section.name` removes a value.

    Raises:
        OptionError: A value does not parse, or a section has no fields.
    """
    for word in words:
        name, _, value = word.lstrip("+~").partition("=")
        *path, field = name.split(".")
        owner = config
        for part in path:
            owner = owner.get(part) if isinstance(owner, dict) else getattr(owner, part, None)
        if owner is None:
            raise OptionError(
                name, value, f"left out while {'.'.join(path)} is empty", "The recipe has no such section."
            )
        if "${" not in value:
            _set(owner, field, None if word.startswith("~") else _parsed(name, value))


def _parsed(name: str, value: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise OptionError.because(name, f"Cannot use {name}={value}: it does not parse. {error}.") from None


def _set(owner: Any, field: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[field] = value
    else:
        setattr(owner, field, value)
