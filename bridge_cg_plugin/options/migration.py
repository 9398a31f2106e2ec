"""Deprecated spellings of language-model graph options: what they become, and what they conflict with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import OptionError
from .language_model import (
    IMPL,
    INFERENCE,
    MODULES,
    SCOPE,
    CudaGraphModule,
    Implementation,
    InferenceCudaGraphScope,
    LanguageModelGraphOptions,
    NormalizedModules,
    complete_modules,
    normalize_cuda_graph_modules,
    normalize_implementation,
    normalize_inference_cuda_graph_scope,
)
from .values import is_unset, parse_flag


@dataclass(frozen=True, slots=True)
class Migration:
    """One row of the migration table.

    Attributes:
        old: The deprecated input.
        new: What it becomes, in words.
        line: What to write instead.
    """

    old: str
    new: str
    line: str

    @property
    def warning(self) -> str:
        """The sentence for the user."""
        return f"{self.old} is deprecated: write {self.line} instead"


SWITCHES: dict[str, Implementation] = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
_FULL_ITERATION = Migration(f"{SCOPE}=full_iteration", "impl full_iteration", f"{IMPL}=full_iteration")
_INFERENCE = Migration(
    f"{SCOPE}=full_iteration_inference",
    "impl local, inference scope block",
    f"{IMPL}=local {INFERENCE}=block",
)
_SCOPE = Migration(f"{SCOPE}=attn,mlp", "modules attn, mlp", f"{MODULES}=attn,mlp")
_FULL = Migration(f"{MODULES}=full", "no modules: the whole layer", f"{MODULES}=[]")
ENUM = Migration("the enum CudaGraphScope", "CudaGraphModule", "CudaGraphModule")
MIGRATIONS = (
    *(Migration(old, f"impl {impl}", f"{IMPL}={impl}") for old, impl in SWITCHES.items()),
    _FULL_ITERATION,
    _INFERENCE,
    _SCOPE,
    _FULL,
    ENUM,
)


@dataclass(frozen=True, slots=True)
class DeprecatedScope:
    """What a word of the old scope means.

    Attributes:
        migration: Its row of the migration table.
        implementations: Those that may be set with it; "none" keeps graphs off.
        inference_scope: The inference scope that it means.
    """

    migration: Migration
    implementations: tuple[Implementation, ...]
    inference_scope: InferenceCudaGraphScope


DEPRECATED_SCOPES = {
    "full_iteration": DeprecatedScope(
        _FULL_ITERATION, ("none", "local", "full_iteration"), InferenceCudaGraphScope.none
    ),
    "full_iteration_inference": DeprecatedScope(_INFERENCE, ("none", "local"), InferenceCudaGraphScope.block),
}


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
    meaning = DEPRECATED_SCOPES[deprecated[0]]
    remedy = f"Keep {meaning.migration.line}."
    if impl is not None and impl not in meaning.implementations:
        allowed = f"left out with {IMPL}={impl}, since it means {IMPL} {' or '.join(meaning.implementations)}"
        raise OptionError(SCOPE, deprecated[0], allowed, remedy)
    if inference_scope not in (None, meaning.inference_scope):
        means = f"{INFERENCE}={meaning.inference_scope.name}"
        allowed = f"left out with {INFERENCE}={inference_scope.name}, since it means {means}"
        raise OptionError(SCOPE, deprecated[0], allowed, remedy)


def language_model_options(
    fields: Mapping[str, Any], explicit: frozenset[str] = frozenset()
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
    impl = None if is_unset(given) else normalize_implementation(given)
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
        warnings.append(Migration(name, "", f"{IMPL}={target}").warning)
        impl = target
    return impl


def _modules(fields: Mapping[str, Any], explicit: frozenset[str], warnings: list[str]) -> NormalizedModules:
    new = normalize_cuda_graph_modules(fields.get(MODULES), MODULES)
    if is_unset(fields.get(SCOPE)):
        if new.full and MODULES in explicit:
            warnings.append(_FULL.warning)
        return new
    old = normalize_cuda_graph_modules(fields[SCOPE], SCOPE)
    empty = not (new.modules or new.deprecated)
    if is_unset(fields.get(MODULES)) or (empty and MODULES not in explicit):
        if old.modules and not old.deprecated:
            names = ",".join(module.name for module in old.modules)
            warnings.append(Migration(f"{SCOPE}={names}", "", f"{MODULES}={names}").warning)
        elif old.full and SCOPE in explicit:
            warnings.append(Migration(f"{SCOPE}=full", "", f"{MODULES}=[]").warning)
        return old
    if set(old.modules) != set(new.modules) or old.deprecated != new.deprecated:
        raise OptionError(
            SCOPE, fields[SCOPE], f"what {MODULES}={fields[MODULES]!r} says", f"Keep {MODULES} and remove {SCOPE}."
        )
    return new


def _migrated(
    name: str, impl: Implementation | None, scope: InferenceCudaGraphScope | None, warnings: list[str]
) -> tuple[Implementation, InferenceCudaGraphScope | None]:
    migration = DEPRECATED_SCOPES[name].migration
    if impl == "none":
        warnings.append(f"{SCOPE}={name} has no effect: {IMPL}=none keeps graphs off. Write {migration.line} for them")
        return "none", None
    warnings.append(migration.warning)
    if name == "full_iteration":
        return "full_iteration", scope
    return "local", InferenceCudaGraphScope.block


def module_names(modules: tuple[CudaGraphModule, ...]) -> list[str]:
    """Return the names of modules, for text and JSON."""
    return [module.name for module in modules]
