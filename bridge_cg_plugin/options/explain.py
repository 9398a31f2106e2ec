"""Graph options in words and as JSON."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .declaration import Group, plain
from .graph_options import ALL_PARTS, LANGUAGE_MODEL_PART, SETTING, VISION_ENCODER, GraphOptions
from .language_model import IMPL, CudaGraphModule
from .packed import PACKED, PackedOptions
from .vision import PROVIDER_FIELDS, VISION, WITHOUT_GRAPHS, VisionGraphOptions

GAP = "  "
# Where names that are longer than a cell are divided.
_JOINTS = re.compile(r"(?<=[_.=,:/])")


def cell_lines(text: str, width: int) -> list[str]:
    """Return the lines of a cell; names that do not fit into it are divided at their joints."""
    lines = [""]
    for word in text.split():
        pieces = [word] if len(word) <= width else _JOINTS.split(word)
        for number, piece in enumerate(pieces):
            gap = " " if lines[-1] and not number else ""
            if lines[-1] and len(lines[-1] + gap + piece) > width:
                lines.append("")
                gap = ""
            lines[-1] += gap + piece
    return lines


VISION_IMPL = PROVIDER_FIELDS["impl"]
_PARTS = {
    CudaGraphModule.attn: "attention",
    CudaGraphModule.mlp: "MLP",
    CudaGraphModule.moe: "MoE layers",
    CudaGraphModule.moe_router: "the MoE router",
    CudaGraphModule.moe_preprocess: "MoE preprocessing",
    CudaGraphModule.mamba: "Mamba layers",
}

PARTS = VISION_ENCODER, LANGUAGE_MODEL_PART
NOTHING = "graphs: none, all eager (no option asks for any)"

# Options that `_activations` describes.
_ACTIVATIONS = ("offload_above_gb", "offload", "recompute")


def as_json(options: GraphOptions) -> dict[str, Any]:
    """Return options as plain values: language_model, vision, packed, chosen and warnings."""
    return {
        "language_model": _plain(options.language_model),
        "vision": _plain(options.vision),
        "packed": _plain(options.packed),
        "chosen": [str(part) for part in options.chosen],
        "warnings": list(options.warnings),
    }


def _plain(part: Any) -> dict[str, Any]:
    return {f.name: plain(getattr(part, f.name)) for f in fields(part)}


@dataclass(frozen=True, slots=True)
class Part:
    """What options make of one part of a model.

    Attributes:
        name: The part.
        runs: "graphs" or "eager".
        why: What is captured, or what keeps it eager.
        options: Other options of it that are not their defaults, as `field=value`.
    """

    name: str
    runs: str
    why: str
    options: tuple[str, ...] = ()


def parts(options: GraphOptions) -> tuple[Part, ...]:
    """Return the vision encoder and the language model."""
    vision, language = options.vision, options.language_model
    of_encoder = _vision(vision) if vision.enabled else []
    of_layers = [_language_model(options), *_packed(options.packed)] if language.enabled else []
    said = ("max_packed_seqs", "buckets", *_ACTIVATIONS)
    further_of_packs = _further(options.packed, PACKED, said) if options.packed.enabled else []
    return (
        _part(options, VISION_ENCODER, VISION_IMPL, vision.impl, of_encoder, _further_of_vision(vision)),
        _part(options, LANGUAGE_MODEL_PART, IMPL, language.impl, of_layers, further_of_packs),
    )


def in_words(options: GraphOptions) -> str:
    """Return options as lines for a person."""
    lines = [f"{part.name}: {'; '.join([part.runs, part.why, *part.options])}" for part in parts(options)]
    return "\n".join([*lines, *(f"warning: {text}" for text in options.warnings)])


def _part(
    options: GraphOptions, name: str, field: str, impl: str, words: Sequence[str], further_options: Sequence[str]
) -> Part:
    setting = f"{SETTING}={options.choice.setting}"
    chosen = [part for part in options.chosen if part.name == name]
    if impl != "none":
        reasons = [setting + (f" ({part.why})" if part.why else "") for part in chosen]
        return Part(name, "graphs", "; ".join([*words, *reasons]), tuple(further_options))
    off = [part.why for part in options.chosen if part.name == ALL_PARTS]
    reasons = [f"{setting}: {part.what}" for part in chosen] or off or [f"{field}=none"]
    return Part(name, "eager", "; ".join(reasons), tuple(further_options))


def in_one_line(options: GraphOptions, names: Collection[str] = PARTS) -> str:
    """Return what of a model is on graphs and what not, and why: the line that training begins with.

    Args:
        options: As they were set, with what the one setting came to.
        names: The parts that the model has.
    """
    setting = options.choice.setting
    if not (options.enabled or options.chosen):
        return NOTHING
    if setting == "off":
        return f"{SETTING}: {options.chosen[0]}"
    chosen = {part.name: part.what for part in options.chosen}
    told = [part for part in parts(options) if part.name in {*names, *chosen}]
    said = [f"{part.name}: {chosen.get(part.name) or _briefly(part)}" for part in told] or [
        "none: the model has no part that graphs take"
    ]
    return f"{f'{SETTING}={setting}' if setting else 'graphs'}: {'; '.join(said)}"


def _briefly(part: Part) -> str:
    return part.why.partition("; ")[0] if part.runs == "graphs" else f"eager ({part.why})"


def _language_model(every: GraphOptions) -> str:
    options = every.language_model
    named = [CudaGraphModule[name] for name in every.padded_parts] or options.modules
    parts = _listed([_PARTS[module] for module in named]) if named else "whole layers"
    region = f"{parts} of every layer, each a region" if named else "all layers as one region"
    if options.impl == "full_iteration" and every.vision.enabled:
        return f"{region} by the plugin, over padded sequences; output layer and losses eager"
    if options.impl == "full_iteration":
        return "one graph of forward and backward of the whole step; inference eager"
    if every.packed.enabled:
        return f"{region} by the plugin, over packed sequences; inference eager"
    by = {"local": "megatron-core", "transformer_engine": "Transformer Engine"}[options.impl]
    inference = {"none": "inference eager", "layer": "inference graphs per layer", "block": "one inference graph"}
    return f"per-layer graphs of {parts} by {by}; {inference[options.inference_scope.name]}"


def _vision(options: VisionGraphOptions) -> list[str]:
    buckets = _buckets(options.buckets, options.max_seq_length)
    return ["one graph per bucket over the whole encoder", buckets, *_activations(options)]


def _further_of_vision(options: VisionGraphOptions) -> list[str]:
    if not options.enabled:
        return _further(options, VISION, [name for name in VISION.fields if name not in WITHOUT_GRAPHS])
    return _further(options, VISION, ("impl", "scope", "buckets", "max_seq_length", *_ACTIVATIONS))


def _further(options: Any, group: Group, said: Collection[str]) -> list[str]:
    """Return options of a group that are not their defaults, as `field=value`, without those that were said."""
    values = {one: getattr(options, one.name) for one in group.options if one.name not in said}
    return [f"{one.field}={value}" for one, value in values.items() if value != one.default]


def _activations(options: VisionGraphOptions | PackedOptions) -> list[str]:
    """Return what is said of activations: nothing where they stay."""
    most = options.offload_above_gb
    offloaded = [f"activations of {_listed(list(options.offload))} go to the host"] if options.offload else []
    recomputed = [f"outputs of {_listed(list(options.recompute))} are recomputed"] if options.recompute else []
    if most is None:
        return [*offloaded, *recomputed]
    target = f"activations are offloaded or recomputed to fit {most:g} GiB a slot"
    return [target, *(f"of them only: {part}" for part in (*offloaded, *recomputed))]


def _packed(options: PackedOptions) -> list[str]:
    if not options.enabled:
        return []
    most = options.max_packed_seqs
    documents = "as many documents as warm-up steps show" if most == "auto" else f"up to {most} documents"
    return [f"graphs of {documents}", _buckets(options.buckets), *_activations(options)]


def _buckets(capacities: tuple[int, ...] | str, longest: int | None = None) -> str:
    if isinstance(capacities, str):
        return "buckets chosen from what warm-up steps show" + (f", up to {longest} tokens" if longest else "")
    return f"buckets of {_listed([str(c) for c in capacities])} tokens"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
