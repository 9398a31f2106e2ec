"""What each supported release of megatron-bridge and megatron-core can be told, and options in its own words."""

from dataclasses import dataclass
from typing import Any

from .choice import SETTING
from .declaration import Group, Option, plain
from .errors import OptionError
from .graph_options import GraphOptions
from .groups import GROUPS
from .language_model import IMPL, INFERENCE, MODULES, SCOPE, LanguageModelGraphOptions
from .migration import SWITCHES, module_names
from .offload import MODULES as OFFLOAD_MODULES
from .offload import OFFLOAD, OFFLOAD_FIELDS, OffloadOptions
from .packed import PACKED
from .vision import VISION

TE_RNG = "use_te_rng_tracker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What a release's configuration of a model can say.

    Attributes:
        name: What to call it in messages.
        fields: Names of the configuration's fields, as far as they are about graphs.
        local_layers: Whether Bridge trains on per-layer graphs of impl local.
        offload_modules: Modules that can be offloaded.
    """

    name: str
    fields: frozenset[str]
    local_layers: bool
    offload_modules: tuple[str, ...] = OFFLOAD_MODULES


def fields_since(release: str) -> frozenset[str]:
    """Return the fields about graphs that upstream's configurations have in a release, as "0.6"."""
    declared = (one for group in GROUPS for one in group.options if one.since)
    return frozenset((SCOPE, *SWITCHES, TE_RNG, *(one.field for one in declared if one.since <= release)))


RELEASES = (
    Release(
        name="megatron-bridge 0.6.2 (megatron-core 0.19.2)",
        fields=fields_since("0.6"),
        local_layers=False,
    ),
    Release(
        name="megatron-bridge 0.5.1 (megatron-core 0.18.2)",
        fields=fields_since("0.5"),
        local_layers=True,
        offload_modules=tuple(module for module in OFFLOAD_MODULES if module != "fused_group_mlp"),
    ),
)


def field_values(options: GraphOptions, release: Release) -> dict[str, Any]:
    """Return the fields, with plain values, that say these options to a release.

    Raises:
        OptionError: The release cannot do what an option asks for; names the release that can.
    """
    return {
        **_language_model_values(options.language_model, release),
        **_values(VISION, options.vision, release),
        **_values(PACKED, options.packed, release),
        **({SETTING: None} if SETTING in release.fields else {}),  # the other fields say what it came to
        **_offload_values(options.offload, release),
        **({TE_RNG: True} if options.enabled and TE_RNG in release.fields else {}),
    }


def _refuse(field: str, value: object, release: Release, able: list[str]) -> OptionError:
    remedy = f"Use {' or '.join(able)}." if able else "No supported release can; remove it."
    return OptionError(field, value, f"left at its default on {release.name}", remedy)


def _language_model_values(options: LanguageModelGraphOptions, release: Release) -> dict[str, Any]:
    names = module_names(options.modules)
    if options.impl == "local" and names and not release.local_layers:
        able = [r.name for r in RELEASES if r.local_layers]
        raise OptionError(
            IMPL,
            "local",
            f"transformer_engine with {MODULES}={','.join(names)} on {release.name}",
            f"Use it, or {' or '.join(able)}.",
        )
    off = {name: False for name in SWITCHES if name in release.fields}
    values = {IMPL: options.impl, MODULES: names, INFERENCE: options.inference_scope.name}
    return {**values, **off, **({SCOPE: None} if SCOPE in release.fields else {})}


def _values(group: Group, part: Any, release: Release) -> dict[str, Any]:
    """Return the fields of a group's options; those that the release does not have must be at their default."""
    values: dict[str, Any] = {group.tuning: {}} if group.tuned and group.tuning in release.fields else {}
    for one in group.options:
        value, old = getattr(part, one.name), (one.old or ("",))[0]
        if one.tuning and group.tuning in values:
            values[group.tuning] |= {one.name: plain(value)} if value != one.default else {}
        elif one.field in release.fields:
            values[one.field] = None if one.old and not value else plain(value)
        elif value != one.default and old not in release.fields:
            raise _no_such_field(group, one, value, release)
        if old in release.fields:  # the name that Bridge itself reads
            values[old] = plain(value)
    return {name: None if value == {} else value for name, value in values.items()}


def _no_such_field(group: Group, one: Option, value: Any, release: Release) -> OptionError:
    if one.since:
        return _refuse(one.field, plain(value), release, [r.name for r in RELEASES if one.field in r.fields])
    return OptionError(
        one.field,
        plain(value),
        "left at its default on a model whose configuration has no such field",
        f"Use a provider of {group.owners}, with the plugin active before it is imported.",
    )


def _offload_values(options: OffloadOptions, release: Release) -> dict[str, Any]:
    for module in options.modules:
        if module not in release.offload_modules:
            able = [r.name for r in RELEASES if module in r.offload_modules]
            raise _refuse(OFFLOAD_FIELDS["modules"], module, release, able)
    return _values(OFFLOAD, options, release)
