"""All graph options of a model as one typed value, and as fields of the releases of megatron-bridge."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from .declaration import Group, OptionError, Parser, one_of, option, parse_choice, plain
from .language_model import IMPL, INFERENCE, LANGUAGE_MODEL, MODULES, SCOPE, SWITCHES, LanguageModelGraphOptions
from .packed import MAX_PACKED_SEQS, PACKED, PackedOptions
from .vision import VISION, VisionGraphOptions

SETTING = "cuda_graphs"
SETTINGS = ("exact", "fastest", "off")
# Names of parts.
VISION_ENCODER, LANGUAGE_MODEL_PART, ALL_PARTS = "vision encoder", "language model", "all"


def _parse(field: str, value: Any) -> str:
    """Return the setting; YAML reads a bare off as false."""
    return parse_choice(field, "off" if value is False else value, SETTINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """The one setting, typed. What it means is in its declaration."""

    setting: Literal["exact", "fastest", "off"] | None = option(
        None,
        Parser(one_of(SETTINGS).allowed, _parse),
        "every graph that the model supports: exact, fastest or off",
        "`exact` rounds outputs and gradients as eager does, packs as eager on as many rows, encoders that are "
        "[near fp32](encoders.md) aside. `fastest` also uses kernels that round gradients differently, and outputs of "
        "[some encoders](encoders.md#what-differs-by-encoder). Both set only fields that are not set. Parts that "
        "cannot be captured stay eager, and the log gives the reason. None sets no field",
        field=SETTING,
    )


CHOICE = Group(name="choice", kind=ChoiceOptions)


@dataclass(frozen=True, slots=True)
class Part:
    """What the setting comes to for one part of a model.

    Attributes:
        name: The part.
        graphs: What of it is on graphs.
        why: Why it is no more than that; empty where it is all.
    """

    name: str
    graphs: str
    why: str = ""

    @property
    def what(self) -> str:
        """What of it is on graphs, and why no more."""
        return self.graphs + (f" ({self.why})" if self.why else "")

    def __str__(self) -> str:
        return f"{self.name}: {self.what}"


GROUPS = (CHOICE, LANGUAGE_MODEL, VISION, PACKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """Everything that a user can say about CUDA graphs of a model.

    Attributes:
        choice: The one setting for all of them.
        language_model: Graphs of the language model.
        vision: Graphs of the vision encoder.
        packed: Packed (thd) sequences in language-model graphs.
        warnings: What the user should know: deprecated spellings, options without effect, wrong gradients of
            upstream.
        chosen: What the one setting came to.
        padded_parts: Of each layer over padded rows, where experts stay eager.
    """

    choice: ChoiceOptions = field(default_factory=ChoiceOptions)
    language_model: LanguageModelGraphOptions = field(default_factory=LanguageModelGraphOptions)
    vision: VisionGraphOptions = field(default_factory=VisionGraphOptions)
    packed: PackedOptions = field(default_factory=PackedOptions)
    warnings: tuple[str, ...] = field(default=(), compare=False)
    chosen: tuple[Part, ...] = field(default=(), compare=False)
    padded_parts: tuple[str, ...] = field(default=(), compare=False)

    @property
    def enabled(self) -> bool:
        """Whether any graphs are asked for."""
        return self.language_model.enabled or self.vision.enabled


def asks_for_vision_graphs(config: Any) -> bool:
    """Whether a model's config has vision graphs on."""
    return getattr(config, VISION.fields["impl"], None) not in (None, "none")


def asks_for_packed_graphs(config: Any) -> bool:
    """Whether a model's config has packed-sequence graphs on."""
    return getattr(config, MAX_PACKED_SEQS, None) is not None and getattr(config, IMPL, None) == "transformer_engine"


def asks_for_graphs(config: Any) -> bool:
    """Whether a model's config has graphs on, of the vision encoder or the language model; alike on all ranks."""
    return asks_for_vision_graphs(config) or getattr(config, IMPL, None) not in (None, "none")


TE_RNG = "use_te_rng_tracker"
LAST_WITH_LOCAL = "megatron-bridge 0.5.1 (megatron-core 0.18.2)"


def field_values(options: GraphOptions, fields: Collection[str], without_local: str = "") -> dict[str, Any]:
    """Return the fields, with plain values, that say these options to a release.

    Args:
        options: The options.
        fields: What a model's configuration has there.
        without_local: The release, if its Bridge does not train on per-layer graphs of impl local.

    Raises:
        OptionError: The release cannot do what an option asks for; names the release that can.
    """
    return {
        **_language_model_values(options.language_model, fields, without_local),
        **_values(VISION, options.vision, fields),
        **_values(PACKED, options.packed, fields),
        **({SETTING: None} if SETTING in fields else {}),  # the other fields say what it came to
        **({TE_RNG: True} if options.enabled and TE_RNG in fields else {}),
    }


def _language_model_values(
    options: LanguageModelGraphOptions, fields: Collection[str], without_local: str
) -> dict[str, Any]:
    names = plain(options.modules)
    if options.impl == "local" and names and without_local:
        raise OptionError(
            IMPL,
            "local",
            f"transformer_engine with {MODULES}={','.join(names)} on {without_local}",
            f"Use it, or {LAST_WITH_LOCAL}.",
        )
    off = {name: False for name in SWITCHES if name in fields}
    values = {IMPL: options.impl, MODULES: names, INFERENCE: options.inference_scope.name}
    return {**values, **off, **({SCOPE: None} if SCOPE in fields else {})}


def _values(group: Group, part: Any, fields: Collection[str]) -> dict[str, Any]:
    """Return the fields of a group's options; those that a configuration does not have must be at their default."""
    values = {}
    for one in group.options:
        value = getattr(part, one.name)
        if one.field in fields:
            values[one.field] = plain(value)
        elif value != one.default:
            allowed = "left at its default on a model whose configuration has no such field"
            remedy = f"Use a provider of {group.owners}, with the plugin active before it is imported."
            raise OptionError(one.field, plain(value), allowed, remedy)
    return values
