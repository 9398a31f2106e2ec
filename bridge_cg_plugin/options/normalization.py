"""Graph options as one typed value, from whatever a user wrote, and back."""

import warnings as python_warnings
from dataclasses import replace
from typing import Any

from .choice import CHOICE, ChoiceOptions
from .choosing import choose
from .combinations import check_options
from .declaration import plain
from .errors import GraphOptionWarning
from .facts import Facts, facts_of
from .graph_options import GraphOptions
from .language_model import IMPL, INFERENCE, MODULES
from .migration import Migration, language_model_options, module_names
from .offload import OFFLOAD, OffloadOptions, offload_options
from .packed import MAX_PACKED_SEQS, PACKED, packed_options
from .precedence import settle
from .shared_offload import offload_without_effect, share_offload
from .sources import Written, collect
from .values import is_unset
from .vision import PROVIDER_FIELDS, SCOPE_FIELD, VISION, WITHOUT_GRAPHS, VisionGraphOptions, vision_options

ALLREDUCE = PROVIDER_FIELDS["deepstack_gradient_allreduce"]
_PAGE = "docs/parallel.md#sequence-parallelism-and-deepstack"


def splits_deepstack(facts: Facts) -> bool:
    """Whether tensor-parallel ranks are known to hold different deepstack features.

    Args:
        facts: What decides it; unknown counts as no.
    """
    return (facts.tensor_ranks or 1) > 1 and bool(facts.sequence_parallel or facts.moe) and bool(facts.deepstack)


def deepstack_warnings(facts: Facts) -> tuple[str, ...]:
    """Return the warning for a run that trains its vision encoder with wrong gradients; empty if it does not.

    Args:
        facts: What decides it; what is unknown warns of nothing.
    """
    if not (splits_deepstack(facts) and facts.encoder_trained):
        return ()
    how = "mixture of experts, where Bridge sets sequence_parallel=true" if facts.moe else "sequence_parallel=true"
    return (
        f"tensor_model_parallel_size={facts.tensor_ranks} with {how}: the vision encoder is trained with wrong "
        "gradients, eager and on graphs, because upstream does not sum the gradients of the deepstack features over "
        f"the tensor-parallel ranks. Write {ALLREDUCE}=true; see {_PAGE}",
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
    check_options(options, facts_of(written))
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
    language_model, warnings = language_model_options(written.fields, written.explicit)
    vision = vision_options(written.fields, *_unit(written))
    if vision.modules and written.fields.get(SCOPE_FIELD) and not written.fields.get(PROVIDER_FIELDS["modules"]):
        names = ",".join(vision.modules)
        warnings += (Migration(f"{SCOPE_FIELD}={names}", "", f"{PROVIDER_FIELDS['modules']}={names}").warning,)
    if vision.enabled and not vision.deepstack_gradient_allreduce:
        warnings += deepstack_warnings(facts_of(written))
    packed = packed_options(written.fields)
    warnings += _without_effect(written, vision, packed.enabled)
    options = GraphOptions(
        choice=ChoiceOptions(**CHOICE.read(written.fields)),
        language_model=language_model,
        vision=vision,
        packed=packed,
        offload=offload_options(written.fields),
        warnings=warnings,
    )
    return options if options.offload == OffloadOptions() else _offloading(options, facts_of(written))


def _offloading(options: GraphOptions, facts: Facts) -> GraphOptions:
    """Return options with the shared option of offloading passed on, and lines for values without effect."""
    shared = share_offload(options, facts) if options.offload.parts else options
    return replace(shared, warnings=(*shared.warnings, *offload_without_effect(shared, facts)))


def _without_effect(written: Written, vision: VisionGraphOptions, packed: bool) -> tuple[str, ...]:
    """Return a line for each group of options that a person wrote for graphs that are off, or captured another way."""
    idle = {one.field for one in VISION.options if one.name not in WITHOUT_GRAPHS} | {SCOPE_FIELD}
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
    found: dict[str, Any] = {
        IMPL: options.language_model.impl,
        MODULES: module_names(options.language_model.modules),
        INFERENCE: options.language_model.inference_scope.name,
    }
    for group in (CHOICE, VISION, PACKED, OFFLOAD):
        part = getattr(options, group.name)
        found |= {one.field: plain(getattr(part, one.name)) for one in group.options}
    return found
