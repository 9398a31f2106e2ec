"""Graph options as one typed value, from whatever a user wrote, and back."""

import warnings as python_warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .choosing import choose
from .combinations import check_options
from .declaration import plain
from .facts import Facts
from .graph_options import CHOICE, GROUPS, ChoiceOptions, GraphOptions
from .language_model import (
    DEPRECATED_SCOPES,
    IMPL,
    IMPLEMENTATIONS,
    INFERENCE,
    MODULES,
    SCOPE,
    SWITCHES,
    language_model_options,
    normalize_cuda_graph_modules,
)
from .packed import MAX_PACKED_SEQS, PACKED, packed_options
from .sources import Written, collect
from .values import GraphOptionWarning, is_unset, parse_capacities, parse_choice, parse_flag, whole_number
from .vision import PROVIDER_FIELDS, SCOPE_FIELD, VISION, WITHOUT_GRAPHS, VisionGraphOptions, vision_options

ALLREDUCE = PROVIDER_FIELDS["deepstack_gradient_allreduce"]
_PAGE = "docs/parallel.md#sequence-parallelism-and-deepstack"


def splits_deepstack(facts: Facts) -> bool:
    """Whether tensor-parallel ranks are known to hold different deepstack features.

    Args:
        facts: What decides it; unknown counts as no.
    """
    return facts.ranks("tensor_model") > 1 and bool(facts["sequence_parallel"] or facts.moe) and facts.deepstack


def deepstack_warnings(facts: Facts) -> tuple[str, ...]:
    """Return the warning for a run that trains its vision encoder with wrong gradients; empty if it does not.

    Args:
        facts: What decides it; what is unknown warns of nothing.
    """
    if not (splits_deepstack(facts) and facts.encoder_trained):
        return ()
    how = "mixture of experts, where Bridge sets sequence_parallel=true" if facts.moe else "sequence_parallel=true"
    return (
        f"tensor_model_parallel_size={facts.ranks('tensor_model')} with {how}: the vision encoder is trained with "
        "wrong gradients, eager and on graphs, because upstream does not sum the gradients of the deepstack features "
        f"over the tensor-parallel ranks. Write {ALLREDUCE}=true; see {_PAGE}",
    )


_warned: set[str] = set()


def graph_options(*sources: Any) -> GraphOptions:
    """Return what the sources say, normalized, typed and checked; warns once per deprecated spelling.

    Args:
        sources: Mappings, YAML, words, config objects or `GraphOptions`, later ones winning; see `sources.collect`.

    Raises:
        OptionError: A value or a combination cannot work.
    """
    options, written = normalize(*sources)
    check_options(options, written.facts)
    warn_once(options)
    return options


def normalize(*sources: Any) -> tuple[GraphOptions, Written]:
    """Return what the sources say, normalized and typed, and what was written; combinations are not checked.

    What a person wrote wins over what a recipe holds: the recipe's value is dropped with a line among the warnings.

    Raises:
        OptionError: A value is none that exists, or a deprecated and a new one disagree.
    """
    if len(sources) == 1 and isinstance(sources[0], GraphOptions):
        return sources[0], Written()
    collected = collect(*(Written(as_fields(s)) if isinstance(s, GraphOptions) else s for s in sources))
    settled, dropped = settle(collected)
    written, chosen = choose(settled, options_of)
    options = options_of(written)
    return replace(options, warnings=(*dropped, *options.warnings), chosen=chosen), written


def options_of(written: Written) -> GraphOptions:
    """Return the typed options of collected fields.

    Raises:
        OptionError: A value is none that exists, or a deprecated and a new one disagree.
    """
    facts = written.facts
    language_model, warnings = language_model_options(written.fields, written.explicit)
    vision = vision_options(written.fields, *_unit(written))
    if vision.enabled and len(set(vision.scope)) == 1:
        warnings += (f"{SCOPE_FIELD}={vision.scope[0]}: one graph holds the whole encoder, attention and MLPs",)
    if vision.enabled and not vision.deepstack_gradient_allreduce:
        warnings += deepstack_warnings(facts)
    packed = packed_options(written.fields)
    return GraphOptions(
        choice=ChoiceOptions(**CHOICE.read(written.fields)),
        language_model=language_model,
        vision=vision,
        packed=packed,
        warnings=warnings + _without_effect(written, vision, packed.enabled),
    )


def _without_effect(written: Written, vision: VisionGraphOptions, packed: bool) -> tuple[str, ...]:
    """Return a line for each group of options that a person wrote for graphs that are off, or captured another way."""
    idle = {one.field for one in VISION.options if one.name not in WITHOUT_GRAPHS}
    groups = (
        (vision.enabled, idle - {PROVIDER_FIELDS["impl"]}, f"vision graphs are off ({PROVIDER_FIELDS['impl']}=none)"),
        (packed, set(PACKED.names), f"packed-sequence graphs are off ({MAX_PACKED_SEQS} is not set)"),
    )
    lines = []
    for on, names, why in groups:
        said = [name for name in written.fields if name in names & written.explicit and not on]
        said = [f"{name}={written.fields[name]}" for name in said if not is_unset(written.fields[name])]
        lines += [f"{', '.join(said)}: no effect, {why}"] if said else []
    return tuple(lines)


def _unit(written: Written) -> tuple[int, str]:
    """Return how many patches of a vision encoder belong together, and what they are; see `vision_options`."""
    tower = getattr(written.model, "vision_config", None)
    image, patch = (getattr(tower, name, None) for name in ("image_size", "patch_size"))
    if isinstance(image, int) and isinstance(patch, int) and not hasattr(tower, "spatial_merge_size"):
        return (image // patch) ** 2, "one image"
    merge = written.settings.get("spatial_merge_size")
    return merge**2 if isinstance(merge, int) and merge > 0 else 4, "one embedding"


def warn_once(options: GraphOptions) -> None:
    """Warn of what the options should tell the user, each sentence once in a process."""
    for text in options.warnings:
        if text not in _warned:
            _warned.add(text)
            python_warnings.warn(text, GraphOptionWarning, stacklevel=3)


def as_fields(options: GraphOptions) -> dict[str, Any]:
    """Return options as plain values under today's field names, from which `normalize` makes the same options."""
    declared = ((group.name, one) for group in GROUPS for one in group.options)
    return {one.field: plain(getattr(getattr(options, name), one.name)) for name, one in declared}


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
        lost = [word for word in held.deprecated if impl not in DEPRECATED_SCOPES[word].implementations]
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
            if held is not None and held[1] not in DEPRECATED_SCOPES[word].implementations:
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
    buckets, longest = parse_capacities(BUCKETS, given[0]), whole_number(1)(LONGEST, given[1])
    if isinstance(buckets, str) or buckets[-1] <= longest:
        return {}
    if BUCKETS in explicit:
        cause = f"{BUCKETS}={','.join(map(str, buckets))}"
        lines.append(_line(f"{LONGEST}={longest}", cause, "reaches beyond it"))
        return {LONGEST: None}
    lost = [str(capacity) for capacity in buckets if capacity > longest]
    lines.append(_line(f"{BUCKETS}={','.join(lost)}", f"{LONGEST}={longest}", "is smaller"))
    return {BUCKETS: list(buckets[: -len(lost)]) or None}
