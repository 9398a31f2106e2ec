"""The plugin's options as fields of Bridge's model providers, where overrides, YAML and checkpoints find them."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..options import PACKED_FIELDS, PROVIDER_FIELDS, SCOPE_FIELD, PackedOptions, VisionGraphOptions
from ..options.offload import SHARED_FIELDS
from .patches import Patch
from .registry import seam
from .registry.models import PROVIDERS
from .registry.packed import PROVIDERS as PACKED_PROVIDERS

DEFAULTS = {
    **{PROVIDER_FIELDS[f.name]: f.default for f in dataclasses.fields(VisionGraphOptions)},
    PROVIDER_FIELDS["modules"]: None,  # what the old name says
    SCOPE_FIELD: (),
}


# Of every model: offloading speaks for language model and encoder.
SHARED_DEFAULTS = dict.fromkeys(SHARED_FIELDS.values())
PACKED_DEFAULTS = {PACKED_FIELDS[f.name]: f.default for f in dataclasses.fields(PackedOptions)}
LANGUAGE_MODEL_DEFAULTS = PACKED_DEFAULTS | SHARED_DEFAULTS

Fields = Mapping[str, dataclasses.Field]


def missing_fields(present: Fields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the plugin's fields, with defaults, that a provider does not have."""
    return {name: default for name, default in defaults.items() if name not in present}


def extended_fields(present: Fields, defaults: Mapping[str, Any]) -> dict[str, dataclasses.Field]:
    """Return a provider's dataclass fields with the plugin's added."""
    return {**present, **{name: _field(name, default) for name, default in missing_fields(present, defaults).items()}}


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
    made.kw_only = True  # providers that are derived later take it by keyword, wherever their own fields stand
    return made


def _patches(module: str, provider: str, defaults: Mapping[str, Any]) -> tuple[Patch, ...]:
    def make_init(old: Callable[..., None]) -> Callable[..., None]:
        present = getattr(sys.modules[module], provider).__dataclass_fields__
        return accepting_init(old, missing_fields(present, defaults))

    extend = functools.partial(extended_fields, defaults=defaults)
    return Patch(seam(f"{provider}.init"), make_init), Patch(seam(f"{provider}.fields"), extend)


PATCHES = (
    *(
        patch
        for module, provider, _ in PACKED_PROVIDERS
        for patch in _patches(module, provider, LANGUAGE_MODEL_DEFAULTS)
    ),
    *(
        patch
        for module, provider in PROVIDERS
        for patch in _patches(module, provider, DEFAULTS | LANGUAGE_MODEL_DEFAULTS)
    ),
)
