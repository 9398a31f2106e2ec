"""What `cuda_graphs` comes to on a model, part by part, and why."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .combinations import DRIVEN_BY_BRIDGE, check_options
from .facts import Facts
from .graph_options import ALL_PARTS, CHOICE, LANGUAGE_MODEL_PART, SETTING, VISION_ENCODER, GraphOptions, Part
from .language_model import IMPL, MODULES, SCOPE, SWITCHES
from .packed import MAX_PACKED_SEQS
from .sources import LANGUAGE_MODEL_FIELDS, Written
from .values import OptionError, is_unset, parse_flag
from .vision import PROVIDER_FIELDS, VISION

VISION_IMPL, KERNELS = PROVIDER_FIELDS["impl"], PROVIDER_FIELDS["kernels"]
UNTRIED = "no graphs of such layers were tried on a GPU"
# Experts in a region take memory that grows with the ranks that share them.
MOST_EXPERT_RANKS = 2
MUCH_MEMORY = f"experts of so many ranks take much memory in a graph; {MODULES}=[] captures them"
NOT_FOUND = "the model has no {} that graphs support"
READS_COUNTS = f"{IMPL}=full_iteration with experts: the host reads the number of tokens of each expert"
READS_IMAGES = f"{IMPL}=full_iteration on this model: megatron-core would capture the images of one step for all"
TRACKERS = ("te_rng_tracker", "use_te_rng_tracker")
# Returns the typed options of fields.
Make = Callable[[Written], GraphOptions]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Fields that put a part on graphs, and what they do in words; why it is not chosen unless a person asks for it."""

    fields: Mapping[str, Any]
    graphs: str
    unless: str = ""


def choose(written: Written, make: Make) -> tuple[Written, tuple[Part, ...]]:
    """Return the fields with what the setting comes to, and what was chosen; unchanged without the setting.

    Of each part the first candidate is taken that no combination refuses. A field that a person wrote, or that has
    another value than its default, stays.

    Args:
        written: What was collected.
        make: Returns the typed options of fields.

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
    written = _without(written, packs)
    if VISION_IMPL in written.fields or written.model is None:
        written = _taken(written, facts, VISION_ENCODER, _vision(setting), (VISION_IMPL,), parts, make)
    written = replace(written, fields={**written.fields, **packs})
    candidates = _language_model(facts, written)
    written = _taken(written, facts, LANGUAGE_MODEL_PART, candidates, (IMPL, *SWITCHES), parts, make)
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
    kernels = {KERNELS: "exact"} if setting == "exact" else {}
    yield _Candidate({VISION_IMPL: "transformer_engine", **kernels}, "the whole encoder")


def _language_model(facts: Facts, written: Written) -> Iterator[_Candidate]:
    """Yield what may be captured of a language model, the fastest first; all of it ran on a GPU (docs/benchmarks)."""
    layers = not _has_linear_attention(written.model)
    if facts.packed_data or facts.loop_parts is not None or not is_unset(written.fields.get(MAX_PACKED_SEQS)):
        yield from _packed(facts) if layers else ()
        return
    unless = READS_COUNTS if facts.moe else READS_IMAGES if facts.other_tower else ""
    yield _Candidate({IMPL: "full_iteration", MODULES: [], SCOPE: None}, "the whole of it", unless)
    if layers and not facts.mamba:
        per_layer = {IMPL: "transformer_engine", SCOPE: None}
        yield from () if facts.moe else [_Candidate({**per_layer, MODULES: []}, "whole layers")]
        yield _Candidate({**per_layer, MODULES: ["attn"]}, "attention")


def _packed(facts: Facts) -> Iterator[_Candidate]:
    packs = {IMPL: "transformer_engine", SCOPE: None, MAX_PACKED_SEQS: "auto"}
    many = facts.moe and facts.ranks("expert_model") > MOST_EXPERT_RANKS
    unless = f"model.expert_model_parallel_size={facts.ranks('expert_model')}: {MUCH_MEMORY}" if many else ""
    yield _Candidate({**packs, MODULES: []}, "all layers as one region over packed sequences", unless)
    if facts.moe:
        router = ["attn", "moe_router", *(["mamba"] if facts.mamba else [])]
        yield _Candidate({**packs, MODULES: router}, "attention and routers over packed sequences")
    yield _Candidate({**packs, MODULES: ["attn"]}, "attention over packed sequences")


def _has_linear_attention(model: Any) -> bool:
    """Whether layers of a model attend linearly, as Qwen3.5's do."""
    return bool(getattr(model, "experimental_attention_variant", None) or getattr(model, "linear_attention_freq", None))


def _taken(
    written: Written,
    facts: Facts,
    name: str,
    candidates: Iterator[_Candidate],
    switches: tuple[str, ...],
    parts: list[Part],
    make: Make,
) -> Written:
    """Return the fields with the first candidate that works, and note what it is."""
    held = [switch for switch in switches if _is_set(written, switch)]
    if held:
        parts.append(Part(name, f"{held[0]}={written.fields[held[0]]}", "as it was set"))
        return written
    if facts.loop_parts is not None and name not in facts.loop_parts:
        parts.append(Part(name, "eager", NOT_FOUND.format(name)))
        return written
    why = reason = None
    for candidate in candidates:
        fields = {field: value for field, value in candidate.fields.items() if not _is_set(written, field)}
        tried = replace(written, fields={**written.fields, **fields})
        unasked = candidate.unless and not _is_set(written, MODULES)
        reason = candidate.unless if unasked else _refusal(tried, facts, make)
        if reason is None:
            parts.append(Part(name, candidate.graphs, why or ""))
            return tried
        why = why or reason
    parts.append(Part(name, "eager", reason or UNTRIED))
    return written


def _refusal(tried: Written, facts: Facts, make: Make) -> str | None:
    """Return why fields cannot work together with the rest; None if they can.

    Raises:
        OptionError: A field of the encoder has a value that no graphs can have; it is looked at only with graphs on.
    """
    try:
        options = make(tried)
    except OptionError as error:
        if error.field in VISION.names:
            raise
        return _reason(error)
    try:
        check_options(options, replace(facts, explicit=tried.explicit))
    except OptionError as error:
        return _reason(error)
    return None


def _reason(error: OptionError) -> str:
    return str(error).removeprefix("Cannot use ")


def _is_set(written: Written, field: str) -> bool:
    """Whether a person wrote a field, or a recipe holds another value than the default."""
    if field in written.explicit:
        return True
    value = written.fields.get(field)
    # Bridge's recipes write "full", whole layers, while graphs are off.
    return not (is_unset(value) or value in ("none", "auto", "full", False) or not value)
