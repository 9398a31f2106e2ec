"""The plugin's options as fields of Bridge's model providers, where overrides, YAML and checkpoints find them."""

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

from ...options.graph_options import CHOICE
from ...options.packed import PACKED
from ...options.vision import VISION
from ..seams.encoders import other_providers
from ..seams.patches import Patch
from ..seams.registry import seam
from ..seams.registry.models import LANGUAGE_MODELS, PROVIDERS, field_seams
from ..seams.seam import Seam

# The one setting speaks for language model and encoder, so every model has its field.
LANGUAGE_MODEL_DEFAULTS = CHOICE.added | PACKED.added
EVERY = VISION.added | LANGUAGE_MODEL_DEFAULTS

Fields = Mapping[str, dataclasses.Field[Any]]

# Providers have hundreds of parameters, and more than a hundred classes derive from them.
_signatures: "weakref.WeakKeyDictionary[Callable[..., Any], inspect.Signature]" = weakref.WeakKeyDictionary()


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    if function not in _signatures:
        _signatures[function] = inspect.signature(function)
    return _signatures[function]


def missing_fields(present: Container[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the plugin's fields, with defaults, that a provider does not have."""
    return {name: default for name, default in defaults.items() if name not in present}


def extended_fields(present: Fields, defaults: Mapping[str, Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return a provider's dataclass fields with the plugin's added."""
    return {**present, **{name: _field(name, default) for name, default in missing_fields(present, defaults).items()}}


def accepting_init(original: Callable[..., None], defaults: Mapping[str, Any]) -> Callable[..., None]:
    """Return a provider's constructor with those of the plugin's fields that it lacks as keyword-only parameters."""
    signature = _signature(original)
    added = missing_fields(signature.parameters, defaults)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, default in added.items():
            object.__setattr__(self, name, kwargs.pop(name, list(default) if default == () else default))
        original(self, *args, **kwargs)

    vars(__init__)["__signature__"] = _extended(signature, added)
    return __init__


def _extended(signature: inspect.Signature, added: Mapping[str, Any]) -> inspect.Signature:
    keyword = inspect.Parameter.KEYWORD_ONLY
    further = [inspect.Parameter(name, keyword, default=default) for name, default in added.items()]
    present = list(signature.parameters.values())
    end = len(present) - any(p.kind is inspect.Parameter.VAR_KEYWORD for p in present)
    return signature.replace(parameters=[*present[:end], *further, *present[end:]])


def extend_family(defaults: Mapping[str, Any], provider: type) -> Callable[[], None]:
    """Give a provider's class the defaults, for objects made before, and classes derived before the fields.

    Dataclasses that are derived later take the fields over by themselves. A derived class with a constructor of its
    own keeps it: it takes the fields if it hands its keywords on.

    Returns:
        A function that undoes all of it.
    """
    changes = contextlib.ExitStack()
    for name, default in defaults.items():
        if not hasattr(provider, name):
            _set(changes, provider, name, default)
    for derived in filter(_is_generated, _derived(provider)):
        constructor: Callable[..., None] = vars(derived)["__init__"]
        if missing_fields(_signature(constructor).parameters, defaults):
            _set(changes, derived, "__init__", accepting_init(constructor, defaults))
        fields: Fields = vars(derived)["__dataclass_fields__"]
        if missing_fields(fields, defaults):
            _set(changes, derived, "__dataclass_fields__", extended_fields(fields, defaults))
    return changes.close


def _set(changes: contextlib.ExitStack, owner: type, name: str, value: Any) -> None:
    """Set an attribute until `changes` ends, or until somebody else replaces it."""
    absent, before = name not in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)

    def undo() -> None:
        if vars(owner).get(name) is not value:
            return
        if absent:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    changes.callback(undo)


def _derived(provider: type) -> Iterator[type]:
    """Yield the classes derived from a provider, but for those with seams of their own and what is derived there."""
    subclasses: list[type] = provider.__subclasses__()
    for derived in subclasses:
        if (derived.__module__, derived.__qualname__) not in PATCHED:
            yield derived
            yield from _derived(derived)


def _is_generated(derived: type) -> bool:
    """Whether a class has a constructor of its own that `dataclass` made from its fields."""
    own = vars(derived)
    if "__init__" not in own or "__dataclass_fields__" not in own:
        return False
    parameters = _signature(own["__init__"]).parameters
    return all(f.name in parameters or f.name in EVERY for f in dataclasses.fields(derived) if f.init)


def _field(name: str, default: Any) -> dataclasses.Field[Any]:
    made: Any = dataclasses.field(default_factory=list) if default == () else dataclasses.field(default=default)
    made.name, made.type = name, Any
    made._field_type = dataclasses._FIELD  # type: ignore[attr-defined]  # the mark of a field has no public name
    made.kw_only = True  # providers that are derived later take it by keyword, wherever their own fields stand
    field: dataclasses.Field[Any] = made
    return field


def _patches(init: Seam, fields: Seam, defaults: Mapping[str, Any]) -> tuple[Patch, Patch]:
    accepting = functools.partial(accepting_init, defaults=defaults)
    extend = functools.partial(extended_fields, defaults=defaults)
    family = functools.partial(extend_family, defaults)
    return Patch(init, accepting), Patch(fields, extend, extra=family)


def _known(provider: str, defaults: Mapping[str, Any]) -> tuple[Patch, Patch]:
    return _patches(seam(f"{provider}.init"), seam(f"{provider}.fields"), defaults)


PATCHED = frozenset((module, provider) for module, provider, *_ in (*LANGUAGE_MODELS, *PROVIDERS, *other_providers()))
PATCHES = (
    *(patch for _, provider, _ in LANGUAGE_MODELS for patch in _known(provider, LANGUAGE_MODEL_DEFAULTS)),
    *(patch for _, provider in PROVIDERS for patch in _known(provider, EVERY)),
    *(patch for place in other_providers() for patch in _patches(*field_seams(*place), EVERY)),
)
