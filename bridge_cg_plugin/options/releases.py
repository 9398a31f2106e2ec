"""What each supported release of megatron-bridge and megatron-core can be told, and options in its own words."""

from dataclasses import dataclass, fields
from typing import Any

from .errors import OptionError
from .graph_options import GraphOptions
from .language_model import IMPL, INFERENCE, MODULES, SCOPE, InferenceCudaGraphScope, LanguageModelGraphOptions
from .migration import SWITCHES, module_names
from .normalization import as_fields
from .offload import CORE_FIELDS, OFFLOAD_FIELDS, SHARED_FIELDS, OffloadOptions
from .offload import MODULES as OFFLOAD_MODULES
from .packed import PACKED_FIELDS, PackedOptions
from .vision import PROVIDER_FIELDS, SCOPE_FIELD, VisionGraphOptions

TE_RNG = "use_te_rng_tracker"
_LATEST_OFFLOAD = {"fused_group_mlp"}


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

    @property
    def splits_scope(self) -> bool:
        """Whether modules, implementation and inference scope are fields of their own."""
        return MODULES in self.fields


_EVERYWHERE = (
    IMPL,
    SCOPE,
    *SWITCHES,
    TE_RNG,
    CORE_FIELDS["enabled"],
    CORE_FIELDS["modules"],
    CORE_FIELDS["min_tensor_size"],
)
_SPLIT = (*_EVERYWHERE, MODULES, INFERENCE, CORE_FIELDS["max_inflight"])
_OLD_OFFLOAD = tuple(module for module in OFFLOAD_MODULES if module not in _LATEST_OFFLOAD)
RELEASES = (
    Release(
        name="megatron-bridge 0.6.2 (megatron-core 0.19.2)",
        fields=frozenset((*_SPLIT, *CORE_FIELDS.values())),
        local_layers=False,
    ),
    Release(
        name="megatron-bridge 0.5.1 (megatron-core 0.18.2)",
        fields=frozenset(_SPLIT),
        local_layers=True,
        offload_modules=_OLD_OFFLOAD,
    ),
    Release(
        name="megatron-bridge 0.4.2 (megatron-core 0.17.1)",
        fields=frozenset(_EVERYWHERE),
        local_layers=True,
        offload_modules=_OLD_OFFLOAD,
    ),
)


def field_values(options: GraphOptions, release: Release) -> dict[str, Any]:
    """Return the fields, with plain values, that say these options to a release.

    Raises:
        OptionError: The release cannot do what an option asks for; names the release that can.
    """
    return {
        **_language_model_values(options.language_model, release),
        **_vision_values(options, release),
        **_packed_values(options, release),
        **_offload_values(options.offload, release),
        **({TE_RNG: True} if options.enabled and TE_RNG in release.fields else {}),
    }


def _refuse(field: str, value: object, release: Release, able: list[str]) -> OptionError:
    remedy = f"Use {' or '.join(able)}." if able else "No supported release can; remove it."
    return OptionError(field, value, f"its default on {release.name}", remedy)


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
    if release.splits_scope:
        values = {IMPL: options.impl, MODULES: names, INFERENCE: options.inference_scope.name}
        return {**values, **off, **({SCOPE: None} if SCOPE in release.fields else {})}
    if options.impl == "full_iteration":
        return {IMPL: "local", SCOPE: [*names, "full_iteration"], **off}
    if options.inference_scope is InferenceCudaGraphScope.block:
        names = [*names, "full_iteration_inference"]
    return {IMPL: options.impl, SCOPE: names, **off}


def _vision_values(options: GraphOptions, release: Release) -> dict[str, Any]:
    values = {name: value for name, value in as_fields(options).items() if name in PROVIDER_FIELDS.values()}
    modules = PROVIDER_FIELDS["modules"]
    defaults: dict[str, Any] = {PROVIDER_FIELDS[f.name]: f.default for f in fields(VisionGraphOptions)}
    for name, value in values.items():
        known = name in release.fields or (name == modules and SCOPE_FIELD in release.fields)
        if not known and value != (list(defaults[name]) if defaults[name] == () else defaults[name]):
            raise OptionError(
                name,
                value,
                "its default on a model whose configuration has no such field",
                "Use a provider of the Qwen3-VL family, with the plugin active before it is imported.",
            )
    kept = {name: value for name, value in values.items() if name in release.fields}
    if SCOPE_FIELD in release.fields:  # the name that Bridge itself reads
        kept[SCOPE_FIELD] = list(values[modules])
        if modules in kept and not values[modules]:
            kept[modules] = None
    return kept


def _packed_values(options: GraphOptions, release: Release) -> dict[str, Any]:
    values = {}
    for f in fields(PackedOptions):
        name, value = PACKED_FIELDS[f.name], getattr(options.packed, f.name)
        if name in release.fields:
            values[name] = list(value) if isinstance(value, tuple) else value
        elif value != f.default:
            raise _no_such_field(name, value)
    return values


def _no_such_field(name: str, value: object) -> OptionError:
    return OptionError(
        name,
        value,
        "its default on a model whose configuration has no such field",
        "Use a provider of a GPT or Qwen3-VL model, with the plugin active before it is imported.",
    )


def _offload_values(options: OffloadOptions, release: Release) -> dict[str, Any]:
    values = {}
    for f in fields(OffloadOptions):
        name, value = OFFLOAD_FIELDS[f.name], getattr(options, f.name)
        if name in release.fields:
            values[name] = list(value) if isinstance(value, tuple) else value
        elif value != f.default and f.name in SHARED_FIELDS:
            raise _no_such_field(name, value)
        elif value != f.default:
            raise _refuse(name, value, release, [r.name for r in RELEASES if name in r.fields])
    for module in options.modules:
        if module not in release.offload_modules:
            able = [r.name for r in RELEASES if module in r.offload_modules]
            raise _refuse(OFFLOAD_FIELDS["modules"], module, release, able)
    return values
