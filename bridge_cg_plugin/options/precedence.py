"""What a person wrote against what a recipe holds: values of the recipe that contradict it are dropped, with a line."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .declaration import is_unset, parse_capacities, parse_choice, parse_flag, plain, whole_number
from .language_model import (
    DEPRECATED_SCOPES,
    IMPL,
    IMPLEMENTATIONS,
    INFERENCE,
    MODULES,
    SCOPE,
    SWITCHES,
    normalize_cuda_graph_modules,
)
from .sources import Written
from .vision import PROVIDER_FIELDS

BUCKETS, LONGEST = PROVIDER_FIELDS["buckets"], PROVIDER_FIELDS["max_seq_length"]


def settle(written: Written) -> tuple[Written, tuple[str, ...]]:
    """Drop values of a recipe that contradict what a person wrote.

    Two values that a person wrote are left as they are: the checks that follow refuse them.

    Returns:
        The fields without what was dropped, and one line for each value that was lost.

    Raises:
        OptionError: A value is none that exists.
    """
    lines: list[str] = []
    for rule in (_drop_conflicting_modules, _drop_conflicting_implementation, _vision_capacities):
        changes = rule(written, lines)
        kept = {name: value for name, value in written.fields.items() if name not in changes}
        changed = {name: value for name, value in changes.items() if value is not None}
        written = replace(written, fields={**kept, **changed})
    return written, tuple(lines)


def _line(lost: str, cause: str, why: str) -> str:
    return f"{lost} of the recipe is dropped: {cause}, as written, {why}"


def _implementation(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the field that chooses an implementation, and the implementation."""
    for name, target in SWITCHES.items():
        if not is_unset(fields.get(name)) and parse_flag(name, fields[name]):
            return f"{name}=true", target
    if is_unset(fields.get(IMPL)):
        return None
    impl = parse_choice(IMPL, fields[IMPL], IMPLEMENTATIONS)
    return f"{IMPL}={impl}", impl


def _drop_conflicting_modules(written: Written, lines: list[str]) -> dict[str, Any]:
    """An implementation was written: a recipe's modules and old words that conflict with it are dropped."""
    chosen = _implementation({name: value for name, value in written.fields.items() if name in written.explicit})
    if chosen is None or not written.explicit.isdisjoint((MODULES, SCOPE)):
        return {}
    cause, impl = chosen
    changes: dict[str, Any] = {}
    for name in (MODULES, SCOPE):
        held = normalize_cuda_graph_modules(written.fields.get(name), name)
        modules = plain(held.modules)
        lost = [word for word in held.deprecated if impl not in DEPRECATED_SCOPES[word][1]]
        if impl == "full_iteration":
            lost, modules = [*modules, *lost], []
        if lost:
            why = "has no modules" if impl == "full_iteration" else "chooses another implementation"
            lines.append(_line(f"{name}={','.join(lost)}", cause, why))
            changes[name] = modules
    return changes


def _drop_conflicting_implementation(written: Written, lines: list[str]) -> dict[str, Any]:
    """A word of the old scope that chooses an implementation was written: a recipe's implementation is dropped."""
    if not written.explicit.isdisjoint((IMPL, *SWITCHES)):
        return {}
    for name in (MODULES, SCOPE):
        if name not in written.explicit:
            continue
        for word in normalize_cuda_graph_modules(written.fields.get(name), name).deprecated:
            held = _implementation(written.fields)
            if held is not None and held[1] not in DEPRECATED_SCOPES[word][1]:
                lines.append(_line(held[0], f"{name}={word}", "chooses another implementation"))
            idle = () if INFERENCE in written.explicit else (INFERENCE,)
            return dict.fromkeys((IMPL, *SWITCHES, *idle))
    return {}


def _vision_capacities(written: Written, lines: list[str]) -> dict[str, Any]:
    """Buckets were written, or the longest: a recipe's value of the other is dropped where it does not fit."""
    explicit = written.explicit.intersection((BUCKETS, LONGEST))
    given = [written.fields.get(name) for name in (BUCKETS, LONGEST)]
    if len(explicit) != 1 or any(map(is_unset, given)):
        return {}
    buckets, longest = parse_capacities(BUCKETS, given[0]), whole_number(1).parse(LONGEST, given[1])
    if isinstance(buckets, str) or buckets[-1] <= longest:
        return {}
    if BUCKETS in explicit:
        cause = f"{BUCKETS}={','.join(map(str, buckets))}"
        lines.append(_line(f"{LONGEST}={longest}", cause, "reaches beyond it"))
        return {LONGEST: None}
    lost = [str(capacity) for capacity in buckets if capacity > longest]
    lines.append(_line(f"{BUCKETS}={','.join(lost)}", f"{LONGEST}={longest}", "is smaller"))
    return {BUCKETS: list(buckets[: -len(lost)]) or None}
