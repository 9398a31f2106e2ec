"""The plugin's options as fields of Bridge's model providers, where overrides, YAML and checkpoints find them."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..options import PROVIDER_FIELDS, SCOPE_FIELD, VisionGraphOptions
from .patches import Patch
from .registry import seam
from .registry.models import PROVIDERS

DEFAULTS = {
    **{PROVIDER_FIELDS[f.name]: f.default for f in dataclasses.fields(VisionGraphOptions)},
    PROVIDER_FIELDS["modules"]: None,  # what the old name says
    SCOPE_FIELD: (),
}


def missing_fields(present: Mapping[str, dataclasses.Field]) -> dict[str, Any]:
    """Return the plugin's fields, with defaults, that a provider does not have."""
    return {name: default for name, default in DEFAULTS.items() if name not in present}


def extended_fields(present: Mapping[str, dataclasses.Field]) -> dict[str, dataclasses.Field]:
    """Return a provider's dataclass fields with the plugin's added."""
    return {**present, **{name: _field(name, default) for name, default in missing_fields(present).items()}}


def accepting_init(original: Callable[..., None], added: Mapping[str, Any]) -> Callable[..., None]:
    """Return a provider's constructor that takes the added fields as keywords."""

    @functools.wraps(original)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name, default in added.items():
            object.__setattr__(self, name, kwargs.pop(name, list(default) if default == () else default))
        original(self, *args, **kwargs)

    return __init__


def _field(name: str, default: Any) -> dataclasses.Field:
    made = dataclasses.field(default_factory=list) if default == () else dataclasses.field(default=default)
    made.name, made.type = name, Any
    made._field_type = dataclasses._FIELD
    return made


def _patches(module: str, provider: str) -> tuple[Patch, ...]:
    def make_init(old: Callable[..., None]) -> Callable[..., None]:
        present = getattr(sys.modules[module], provider).__dataclass_fields__
        return accepting_init(old, missing_fields(present))

    return Patch(seam(f"{provider}.init"), make_init), Patch(seam(f"{provider}.fields"), extended_fields)


PATCHES = tuple(patch for module, provider in PROVIDERS for patch in _patches(module, provider))
