"""Options of language-model graphs, today's and deprecated ones, as config objects and command lines write them."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from .declaration import Group, OptionError, Parser, is_unset, one_of, option, parse_choice, parse_flag, word, words

Implementation = Literal["none", "local", "transformer_engine", "full_iteration"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


class CudaGraphModule(enum.Enum):
    """A part of a layer that is captured as a graph of its own; no parts means the whole layer."""

    attn = 1
    mlp = 2
    moe = 3
    moe_router = 4
    moe_preprocess = 5
    mamba = 6


class InferenceCudaGraphScope(enum.Enum):
    """Who owns inference graphs: nobody, every layer, or the block of layers."""

    none = 1
    layer = 2
    block = 3


IMPL, MODULES, SCOPE, INFERENCE = (
    "cuda_graph_impl",
    "cuda_graph_modules",
    "cuda_graph_scope",
    "inference_cuda_graph_scope",
)
MODULE_NAMES = tuple(module.name for module in CudaGraphModule)
_MODULES_ALLOWED = f"any of {', '.join(MODULE_NAMES)}, or empty for the whole layer"
_SCOPE_NAMES = tuple(scope.name for scope in InferenceCudaGraphScope)


class NormalizedModules(NamedTuple):
    """A parsed list of modules.

    Attributes:
        modules: The modules, typed, each once.
        deprecated: Words of the old scope that were among them and mean something else.
        full: Whether the old word "full" was used for the whole layer.
    """

    modules: tuple[CudaGraphModule, ...]
    deprecated: tuple[str, ...]
    full: bool


def normalize_cuda_graph_modules(value: Any, field: str = MODULES) -> NormalizedModules:
    """Return modules, typed, from any spelling: None, strings, comma-separated or bracketed, enums, lists.

    Raises:
        OptionError: An entry is no module, or "full" is combined with others.
    """
    names = words(value)
    if "full" in names:
        if names != ("full",):
            raise OptionError(
                field, value, '"full" alone', "Write the modules without it, or an empty list for the whole layer."
            )
        return NormalizedModules((), (), True)
    for name in names:
        if name not in (*MODULE_NAMES, *DEPRECATED_SCOPES):
            raise OptionError(field, value, _MODULES_ALLOWED, _remedy(name))
    modules = tuple(CudaGraphModule[name] for name in names if name in MODULE_NAMES)
    return NormalizedModules(modules, tuple(name for name in names if name in DEPRECATED_SCOPES), False)


def _remedy(name: str) -> str:
    if name == "none":
        return f"Set {IMPL}=none for no graphs: an empty list of modules means the whole layer."
    return f"Remove {name!r}."


def normalize_inference_cuda_graph_scope(value: Any, impl: Implementation) -> InferenceCudaGraphScope:
    """Return the inference scope, typed; where none is chosen, the default of the implementation.

    Raises:
        OptionError: There is no such scope.
    """
    if is_unset(value):
        return InferenceCudaGraphScope.layer if impl == "local" else InferenceCudaGraphScope.none
    parse_choice(INFERENCE, value, _SCOPE_NAMES)
    return InferenceCudaGraphScope[word(value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelGraphOptions:
    """Language-model CUDA graphs, typed. What each option means is in its declaration."""

    impl: Implementation = option(
        "none",
        one_of(IMPLEMENTATIONS),
        "language-model graphs: none, local, transformer_engine or full_iteration",
        "`local`: per-layer graphs by megatron-core. `transformer_engine`: per-layer graphs by Transformer Engine. "
        "`full_iteration`: one graph of the whole step; on a model that takes images, all layers of a pipeline's stage "
        "as one region",
        field=IMPL,
        upstreams=True,
    )
    modules: tuple[CudaGraphModule, ...] = option(
        (),
        Parser(_MODULES_ALLOWED, lambda field, value: normalize_cuda_graph_modules(value, field).modules),
        f"parts of a layer to capture: {', '.join(MODULE_NAMES)}; [] is the whole layer",
        "With `cuda_graph_impl=local`, `moe_router` and `moe_preprocess` are captured together",
        field=MODULES,
        upstreams=True,
    )
    inference_scope: InferenceCudaGraphScope = option(
        InferenceCudaGraphScope.none,
        Parser(" or ".join(_SCOPE_NAMES), lambda field, value: normalize_inference_cuda_graph_scope(value, "none")),
        "inference graphs: none, layer or block",
        "The default depends on `cuda_graph_impl`",
        field=INFERENCE,
        upstreams=True,
    )

    @property
    def enabled(self) -> bool:
        """Whether language-model graphs are asked for."""
        return self.impl != "none"

    @property
    def per_layer(self) -> bool:
        """Whether layers, or parts of them, are graphs of their own."""
        return self.impl in ("local", "transformer_engine")

    def captures(self, module: CudaGraphModule) -> bool:
        """Whether per-layer graphs contain this part of a layer."""
        return self.per_layer and (not self.modules or module in self.modules)


LANGUAGE_MODEL = Group(name="language_model", kind=LanguageModelGraphOptions)


def complete_modules(impl: Implementation, modules: tuple[CudaGraphModule, ...]) -> tuple[CudaGraphModule, ...]:
    """Return what megatron-core captures for these modules: impl local takes router and preprocessing as one."""
    pair = (CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess)
    if impl != "local" or not any(module in modules for module in pair):
        return modules
    return (*modules, *(module for module in pair if module not in modules))


SWITCHES: dict[str, Implementation] = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}


# Upstream's deprecated fields.
DEPRECATED = (SCOPE, *SWITCHES)


# Word of the old scope -> what to write instead, the implementations that may be set with it ("none" keeps graphs off),
# and the inference scope that it means.
DEPRECATED_SCOPES: dict[str, tuple[str, tuple[Implementation, ...], InferenceCudaGraphScope]] = {
    "full_iteration": (f"{IMPL}=full_iteration", ("none", "local", "full_iteration"), InferenceCudaGraphScope.none),
    "full_iteration_inference": (f"{IMPL}=local {INFERENCE}=block", ("none", "local"), InferenceCudaGraphScope.block),
}


def deprecation(old: str, new: str) -> str:
    """Return the warning of a deprecated spelling."""
    return f"{old} is deprecated: write {new} instead"


def check_deprecated_scope(
    deprecated: tuple[str, ...], impl: Implementation | None, inference_scope: InferenceCudaGraphScope | None
) -> None:
    """Refuse words of the old scope that conflict with new fields; None is a field that was not given.

    Raises:
        OptionError: They disagree; names both.
    """
    if len(deprecated) > 1:
        raise OptionError(SCOPE, ",".join(deprecated), " or ".join(deprecated), "Keep one of them.")
    if not deprecated:
        return
    new, implementations, meant = DEPRECATED_SCOPES[deprecated[0]]
    remedy = f"Keep {new}."
    if impl is not None and impl not in implementations:
        allowed = f"left out with {IMPL}={impl}, since it means {IMPL} {' or '.join(implementations)}"
        raise OptionError(SCOPE, deprecated[0], allowed, remedy)
    if inference_scope not in (None, meant):
        allowed = f"left out with {INFERENCE}={inference_scope.name}, since it means {INFERENCE}={meant.name}"
        raise OptionError(SCOPE, deprecated[0], allowed, remedy)


def language_model_options(
    fields: Mapping[str, Any], explicit: frozenset[str]
) -> tuple[LanguageModelGraphOptions, tuple[str, ...]]:
    """Return the options that fields of any release say, and what to tell the user about them.

    Args:
        fields: Old and new field names with what was written; absent and None is not given.
        explicit: Fields that a person wrote. Another field may hold a config object's default, so it cannot disagree.

    Raises:
        OptionError: A value is none that exists, or a deprecated and a new one disagree.
    """
    warnings: list[str] = []
    impl = _implementation(fields, explicit, warnings)
    found = _modules(fields, explicit, warnings)
    given = fields.get(INFERENCE)
    scope = None if is_unset(given) else normalize_inference_cuda_graph_scope(given, "none")
    check_deprecated_scope(found.deprecated, impl, scope)
    for name in found.deprecated:
        impl, scope = _migrated(name, impl, scope, warnings)
    impl = impl or "none"
    if impl == "none" and found.modules:
        names = ",".join(module.name for module in found.modules)
        warnings.append(f"{MODULES}={names} has no effect: language-model graphs are off ({IMPL}=none)")
    options = LanguageModelGraphOptions(
        impl=impl,
        modules=complete_modules(impl, found.modules),
        inference_scope=normalize_inference_cuda_graph_scope(scope, impl),
    )
    return options, tuple(warnings)


def _implementation(fields: Mapping[str, Any], explicit: frozenset[str], warnings: list[str]) -> Implementation | None:
    given = fields.get(IMPL)
    impl = None if is_unset(given) else parse_choice(IMPL, given, IMPLEMENTATIONS)
    on = [name for name in SWITCHES if not is_unset(fields.get(name)) and parse_flag(name, fields[name])]
    if len(on) > 1:
        raise OptionError(on[0], True, f"left out with {' and '.join(on[1:])}", f"Set {IMPL} and remove both.")
    for name in on:
        target = SWITCHES[name]
        disagrees = impl not in (None, target) and (impl != "none" or IMPL in explicit)
        if disagrees:
            raise OptionError(
                name,
                True,
                f"left out with {IMPL}={impl}, since it means {IMPL}={target}",
                f"Keep {IMPL} and remove {name}.",
            )
        warnings.append(deprecation(name, f"{IMPL}={target}"))
        impl = target
    return impl


def _modules(fields: Mapping[str, Any], explicit: frozenset[str], warnings: list[str]) -> NormalizedModules:
    new = normalize_cuda_graph_modules(fields.get(MODULES), MODULES)
    if is_unset(fields.get(SCOPE)):
        if new.full and MODULES in explicit:
            warnings.append(deprecation(f"{MODULES}=full", f"{MODULES}=[]"))
        return new
    old = normalize_cuda_graph_modules(fields[SCOPE], SCOPE)
    empty = not (new.modules or new.deprecated)
    if is_unset(fields.get(MODULES)) or (empty and MODULES not in explicit):
        if old.modules and not old.deprecated:
            names = ",".join(module.name for module in old.modules)
            warnings.append(deprecation(f"{SCOPE}={names}", f"{MODULES}={names}"))
        elif old.full and SCOPE in explicit:
            warnings.append(deprecation(f"{SCOPE}=full", f"{MODULES}=[]"))
        return old
    if set(old.modules) != set(new.modules) or old.deprecated != new.deprecated:
        raise OptionError(
            SCOPE, fields[SCOPE], f"what {MODULES}={fields[MODULES]!r} says", f"Keep {MODULES} and remove {SCOPE}."
        )
    return new


def _migrated(
    name: str, impl: Implementation | None, scope: InferenceCudaGraphScope | None, warnings: list[str]
) -> tuple[Implementation, InferenceCudaGraphScope | None]:
    new = DEPRECATED_SCOPES[name][0]
    if impl == "none":
        warnings.append(f"{SCOPE}={name} has no effect: {IMPL}=none keeps graphs off. Write {new} for them")
        return "none", None
    warnings.append(deprecation(f"{SCOPE}={name}", new))
    if name == "full_iteration":
        return "full_iteration", scope
    return "local", InferenceCudaGraphScope.block
