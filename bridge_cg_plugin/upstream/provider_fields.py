"""The plugin's options as fields of Bridge's model providers, where overrides, YAML and checkpoints find them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from ..options import PROVIDER_FIELDS, VisionGraphOptions
from .patches import Patch

DEFAULTS = {PROVIDER_FIELDS[f.name]: f.default for f in dataclasses.fields(VisionGraphOptions)}


def with_fields(provider: type) -> tuple[dict[str, dataclasses.Field], Callable[..., None]]:
    """Return the dataclass fields and the constructor of `provider` with the plugin's fields added."""
    present = provider.__dataclass_fields__
    added = {name: default for name, default in DEFAULTS.items() if name not in present}
    fields = {**present, **{name: _field(name, default) for name, default in added.items()}}
    original = provider.__init__

    @functools.wraps(original)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name, default in added.items():
            object.__setattr__(self, name, kwargs.pop(name, list(default) if default == () else default))
        original(self, *args, **kwargs)

    return fields, __init__


def _field(name: str, default: Any) -> dataclasses.Field:
    made = dataclasses.field(default_factory=list) if default == () else dataclasses.field(default=default)
    made.name, made.type = name, Any
    made._field_type = dataclasses._FIELD
    return made


def _patches(module: str, provider: str) -> tuple[Patch, ...]:
    def make_init(old: Callable[..., None]) -> Callable[..., None]:
        return with_fields(_class(module, provider))[1]

    def make_fields(old: dict[str, dataclasses.Field]) -> dict[str, dataclasses.Field]:
        return with_fields(_class(module, provider))[0]

    purpose = "vision graph options can be set, overridden and saved with the model's configuration"
    return (
        Patch(f"{provider}.init", module, f"{provider}.__init__", make_init, purpose, optional=True),
        Patch(f"{provider}.fields", module, f"{provider}.__dataclass_fields__", make_fields, purpose, optional=True),
    )


def _class(module: str, name: str) -> type:
    import sys

    return getattr(sys.modules[module], name)


PATCHES = (
    *_patches("megatron.bridge.models.qwen_vl.qwen3_vl_provider", "Qwen3VLModelProvider"),
    *_patches("megatron.bridge.models.qwen_vl.qwen3_vl_provider", "Qwen3VLMoEModelProvider"),
    *_patches("megatron.bridge.models.qwen_vl.qwen35_vl_provider", "Qwen35VLModelProvider"),
    *_patches("megatron.bridge.models.qwen_vl.qwen35_vl_provider", "Qwen35VLMoEModelProvider"),
)
