"""Graph options as one typed value, from whatever a user wrote, and back; what `cuda_graphs` comes to on a model."""

import warnings as python_warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..switches import EXPERT_BOUNDS
from .combinations import DRIVEN_BY_BRIDGE, check_options, padded_parts
from .declaration import GraphOptionWarning, OptionError, is_unset, parse_flag, plain
from .facts import DELTA_NETS, Facts
from .graph_options import (
    ALL_PARTS,
    CHOICE,
    GROUPS,
    LANGUAGE_MODEL_PART,
    SETTING,
    VISION_ENCODER,
    ChoiceOptions,
    GraphOptions,
    Part,
)
from .language_model import IMPL, MODULES, SCOPE, SWITCHES, language_model_options
from .packed import MAX_PACKED_SEQS, PACKED, PackedOptions
from .precedence import settle
from .sources import LANGUAGE_MODEL_FIELDS, Written, collect
from .vision import (
    PROVIDER_FIELDS,
    SCOPE_FIELD,
    VISION,
    WITHOUT_GRAPHS,
    VisionGraphOptions,
    has_flash_attention,
    vision_options,
)

VISION_IMPL, KERNELS, ATTENTION = (PROVIDER_FIELDS[name] for name in ("impl", "kernels", "attention"))
UNTRIED = "no graphs of such layers were tried on a GPU"
MUCH_MEMORY = "experts of so many ranks take much memory in a graph"
# Settings under which parameters have no address of their own; upstream's graphs of layers were not tried with them.
MOVES, MOVED = ("use_megatron_fsdp", "use_torch_fsdp2"), "it moves parameters, and graphs read fixed addresses"
NOT_FOUND = "the model has no {} that graphs support"
READS_COUNTS = f"{IMPL}=full_iteration with experts: the host reads the number of tokens of each expert"
READS_IMAGES = f"{IMPL}=full_iteration on this model: megatron-core would capture the images of one step for all"
TRACKERS = ("te_rng_tracker", "use_te_rng_tracker")


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Fields that put a part on graphs, and what they do in words; why it is not chosen unless a person asks for it.

    A note tells what of the part stays eager.
    """

    fields: Mapping[str, Any]
    graphs: str
    unless: str = ""
    note: str = ""


def choose(written: Written) -> tuple[Written, tuple[Part, ...]]:
    """Return the fields with what the setting comes to, and what was chosen; unchanged without the setting.

    Of each part the first candidate is taken that no combination refuses. A field that a person wrote, or that has
    another value than its default, stays.

    Raises:
        OptionError: There is no such setting, a field has a value that no graphs can have, or a person wrote that
            random states are tracked as graphs cannot use them.
    """
    setting = CHOICE.read(written.fields).get("setting")
    if setting is None:
        return written, ()
    if setting == "off":
        return _eager(written), (Part(ALL_PARTS, "eager", f"{SETTING}=off"),)
    refuse_other_trackers(written)
    parts: list[Part] = []
    facts = written.facts.but(te_rng_tracker=True, check_for_nan_in_loss=False)
    if facts.loop_parts is not None:
        written = _without_idle(written)
    # How packs are captured matters with graphs of the language model only, which are chosen after the encoder's.
    free = not any(_is_set(written, switch) for switch in (IMPL, *SWITCHES))
    packs = {name: value for name, value in written.fields.items() if free and name == MAX_PACKED_SEQS}
    # While graphs are off, a recipe's modules are captured by nobody.
    idle = {MODULES, SCOPE} - written.explicit if free else set()
    written = _without(written, packs.keys() | idle)
    if VISION_IMPL in written.fields or written.model is None:
        written = _taken(written, facts, VISION_ENCODER, _vision(setting), (VISION_IMPL,), parts)
    written = replace(written, fields={**written.fields, **packs})
    moved = next((f"{name}=True: {MOVED}" for name in MOVES if facts[name]), "")
    candidates = (replace(each, unless=moved or each.unless) for each in _language_model(facts, written))
    written = _taken(written, facts, LANGUAGE_MODEL_PART, candidates, (IMPL, *SWITCHES), parts)
    if written.fields.get(IMPL) in (None, "none"):
        written = _without(written, packs)
    settings = dict.fromkeys(TRACKERS, True)
    if written.fields.get(IMPL) == "full_iteration":
        settings["check_for_nan_in_loss"] = False
    return replace(written, settings={**written.settings, **settings}), tuple(parts)


def _eager(written: Written) -> Written:
    """Return the fields with all graphs off, and without what would only say how they are captured."""
    off = {name: "none" for name in (VISION_IMPL, IMPL) if name in written.fields or written.model is None}
    kept = _without(written, (*LANGUAGE_MODEL_FIELDS, MAX_PACKED_SEQS))
    return replace(written, fields={**kept.fields, **off})


def _without_idle(written: Written) -> Written:
    """Return the fields without graphs that a model's config holds, which only Bridge's loop drives."""
    held = written.fields.get(IMPL) in DRIVEN_BY_BRIDGE and is_unset(written.fields.get(MAX_PACKED_SEQS))
    return _without(written, set(LANGUAGE_MODEL_FIELDS) - written.explicit) if held else written


def _without(written: Written, names: Collection[str]) -> Written:
    return replace(written, fields={name: value for name, value in written.fields.items() if name not in names})


def refuse_other_trackers(written: Written) -> None:
    """Refuse the setting beside a tracker of random states that graphs cannot use and that a person wrote.

    Raises:
        OptionError: There are both.
    """
    setting = CHOICE.read(written.fields).get("setting", "off")
    if setting == "off":
        return
    for name in TRACKERS:
        value = written.settings.get(name)
        if name in written.explicit and not is_unset(value) and not parse_flag(name, value):
            section = "rng" if name == "te_rng_tracker" else "model"
            why = "graphs need Transformer Engine's tracker of random states"
            raise OptionError.because(
                SETTING, f"Cannot use {SETTING}={setting} with {section}.{name}=false: {why}. Remove one of the two."
            )


def _vision(setting: str) -> Iterator[_Candidate]:
    kernels = {KERNELS: "exact"} if setting == "exact" else {ATTENTION: "flash"} if has_flash_attention() else {}
    yield _Candidate({VISION_IMPL: "transformer_engine", **kernels}, "the whole encoder")


def _language_model(facts: Facts, written: Written) -> Iterator[_Candidate]:
    """Yield what may be captured of a language model, the fastest first; docs/benchmarks has what ran on a GPU."""
    if facts.diffusion:
        return
    layers = _are_known(written.model)
    if facts.packed_data or facts.loop_parts is not None or not is_unset(written.fields.get(MAX_PACKED_SEQS)):
        yield from _packed(facts) if layers else ()
        return
    whole: dict[str, Any] = {IMPL: "full_iteration", MODULES: [], SCOPE: None}
    if facts.rows is False:
        unless = READS_COUNTS if facts.moe else READS_IMAGES if facts.other_tower else ""
        yield _Candidate(whole, "the whole step", unless)
    else:
        yield _Candidate(whole, "all layers as one region", _many_experts(facts), _prediction(facts))
        if facts.shares_experts:
            yield _Candidate(whole, "attention and routers over padded sequences", "", _prediction(facts))
    if layers and not facts.mamba:
        per_layer = {IMPL: "transformer_engine", SCOPE: None}
        if facts.moe:
            parts = ["attn", "moe_router", "moe_preprocess"]
            yield _Candidate({**per_layer, MODULES: parts}, "attention, routers and preprocessing of experts")
        else:
            yield _Candidate({**per_layer, MODULES: []}, "whole layers")
        yield _Candidate({**per_layer, MODULES: ["attn"]}, "attention")


def _prediction(facts: Facts) -> str:
    """Return that multi-token prediction, which is behind the layers, stays eager; empty without it."""
    return "multi-token prediction runs eager" if facts["mtp_num_layers"] else ""


def _many_experts(facts: Facts, captures: str = "") -> str:
    """Return why experts stay outside unless a person asks for them; empty where they need not."""
    if not facts.shares_experts:
        return ""
    ranks, bounds = facts.ranks("expert_model"), f"{EXPERT_BOUNDS}=1"
    if facts.expert_shards > 1:
        return f"model.expert_tensor_parallel_size={facts.expert_shards}: not measured; {bounds} captures them"
    how = f"{captures} captures them, with {bounds} in less" if captures else f"{bounds} captures them"
    return f"model.expert_model_parallel_size={ranks}: {MUCH_MEMORY}; {how}"


def _packed(facts: Facts) -> Iterator[_Candidate]:
    packs = {IMPL: "transformer_engine", SCOPE: None, MAX_PACKED_SEQS: "auto"}
    unless = _many_experts(facts, f"{MODULES}=[]")
    words = "all layers as one region over packed sequences"
    yield _Candidate({**packs, MODULES: []}, words, unless, _prediction(facts))
    if facts.moe:
        router = ["attn", "moe_router", *(["mamba"] if facts.mamba else [])]
        yield _Candidate({**packs, MODULES: router}, "attention and routers over packed sequences")
    yield _Candidate({**packs, MODULES: ["attn"]}, "attention over packed sequences")


def _are_known(model: Any) -> bool:
    """Whether graphs of a model's layers are known: of attention, and of Qwen3.5's gated delta nets."""
    return getattr(model, "experimental_attention_variant", None) in (None, DELTA_NETS)


def _taken(
    written: Written,
    facts: Facts,
    name: str,
    candidates: Iterator[_Candidate],
    switches: tuple[str, ...],
    parts: list[Part],
) -> Written:
    """Return the fields with the first candidate that works, and note what it is."""
    held = [switch for switch in switches if _is_set(written, switch)]
    if held:
        parts.append(Part(name, f"{held[0]}={written.fields[held[0]]}", "as it was set"))
        return written
    if facts.loop_parts is not None and name not in facts.loop_parts:
        parts.append(Part(name, "eager", NOT_FOUND.format(name)))
        return written
    why = reason = first = None
    for candidate in candidates:
        fields = {field: value for field, value in candidate.fields.items() if not _is_set(written, field)}
        tried = replace(written, fields={**written.fields, **fields})
        unasked = candidate.unless and not _is_set(written, MODULES)
        reason = candidate.unless if unasked else _refusal(tried, facts)
        if reason is None:
            parts.append(Part(name, candidate.graphs, "; ".join(filter(None, (why, candidate.note)))))
            return tried
        why, first = why or reason, first or candidate.graphs
    more = f" For {first}: {why.rstrip('.')}." if why and why != reason else ""
    parts.append(Part(name, "eager", f"{reason or UNTRIED}{more}"))
    return written


def _refusal(tried: Written, facts: Facts) -> str | None:
    """Return why fields cannot work together with the rest; None if they can.

    Raises:
        OptionError: A field of the encoder has a value that no graphs can have; it is looked at only with graphs on.
    """
    try:
        check_options(options_of(tried), facts)
    except OptionError as error:
        if error.field in VISION.names:
            raise
        return str(error).removeprefix("Cannot use ")
    return None


def _is_set(written: Written, field: str) -> bool:
    """Whether a person wrote a field, or a recipe holds another value than the default."""
    if field in written.explicit:
        return True
    value = written.fields.get(field)
    # Bridge's recipes write "full", whole layers, while graphs are off.
    return not (is_unset(value) or value in ("none", "auto", "full", False) or not value)


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


_RECOMPUTED_DEEPSTACK = (
    "model.recompute_granularity=full: upstream gives the vision encoder's deepstack features no gradients, so eager "
    "trains the encoder wrongly. With vision graphs they have them, in eager microbatches too"
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
    warn_of_options(options)
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
    written, chosen = choose(settled)
    options = options_of(written)
    return replace(options, warnings=(*dropped, *options.warnings), chosen=chosen), written


def held_options(config: Any) -> GraphOptions:
    """Return the options that a model's config holds.

    Raises:
        OptionError: A value is none that exists, or a deprecated and a new one disagree.
    """
    return options_of(without_idle_fields(collect(config)))


def without_idle_fields(written: Written) -> Written:
    """Drop language-model fields that upstream does not read because graphs are off, as recipes leave them."""
    on = written.fields.get(IMPL) not in (None, "none") or any(written.fields.get(name) for name in SWITCHES)
    return written if on else _without(written, LANGUAGE_MODEL_FIELDS)


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
    if vision.enabled and facts.deepstack and facts.encoder_trained and facts["recompute_granularity"] == "full":
        warnings += (_RECOMPUTED_DEEPSTACK,)
    packed = PackedOptions(**PACKED.read(written.fields))
    options = GraphOptions(
        choice=ChoiceOptions(**CHOICE.read(written.fields)),
        language_model=language_model,
        vision=vision,
        packed=packed,
        warnings=warnings + _without_effect(written, vision, packed.enabled),
    )
    return replace(options, padded_parts=padded_parts(options, facts))


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


def warn_of_options(options: GraphOptions) -> None:
    """Warn of what the options should tell the user, each sentence once in a process."""
    for text in options.warnings:
        if text not in _warned:
            _warned.add(text)
            python_warnings.warn(text, GraphOptionWarning, stacklevel=3)


def as_fields(options: GraphOptions) -> dict[str, Any]:
    """Return options as plain values under today's field names, from which `normalize` makes the same options."""
    declared = ((group.name, one) for group in GROUPS for one in group.options)
    return {one.field: plain(getattr(getattr(options, name), one.name)) for name, one in declared}
