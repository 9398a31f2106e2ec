"""Graph options as fields of Bridge's providers, and on config objects: apply, read, change for a while.

Overrides, YAML and checkpoints find the fields on the providers. The environment's options come to them, too.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...announce import Told, announce, warn
from ...options import Facts, GraphOptions, OptionError, check_options, graph_options, normalize
from ...options.declaration import GONE, is_unset, refuse_gone
from ...options.explain import PARTS, in_one_line
from ...options.facts import OFFLOADS
from ...options.graph_options import CHOICE, TE_RNG, field_values
from ...options.language_model import INFERENCE, MODULES, LanguageModelGraphOptions
from ...options.normalization import VISION_IMPL, warn_of_options
from ...options.packed import PACKED
from ...options.sources import (
    FIELDS,
    LANGUAGE_MODEL_FIELDS,
    SETTINGS,
    Written,
    collect,
    fields_of,
    misspelt,
    set_together,
)
from ...options.vision import VISION
from ..environment import OPTIONS
from ..seams.encoders import other_providers
from ..seams.patches import Patch, bridge_release, core_release
from ..seams.registry import seam
from ..seams.registry.bridge import LANGUAGE_MODELS, PROVIDERS, field_seams
from ..seams.seam import Seam, too_old

# The one setting speaks for language model and encoder, so every model has its field.
LANGUAGE_MODEL_DEFAULTS = CHOICE.added | PACKED.added
EVERY = VISION.added | LANGUAGE_MODEL_DEFAULTS

# Attributes of a config: the options that were set on it last, and what was printed of them.
APPLIED = "_bridge_cg_options"
_told = Told()

Fields = Mapping[str, dataclasses.Field[Any]]


def extended_fields(present: Fields, defaults: Mapping[str, Any]) -> dict[str, dataclasses.Field[Any]]:
    """Return a provider's dataclass fields with the plugin's added."""
    return {**present, **{name: _field(name, default) for name, default in defaults.items() if name not in present}}


def accepting_init(original: Callable[..., None], defaults: Mapping[str, Any]) -> Callable[..., None]:
    """Return a provider's constructor with those of the plugin's fields that it lacks as keyword-only parameters."""
    signature = inspect.signature(original)
    added = {name: default for name, default in defaults.items() if name not in signature.parameters}
    gone = GONE.keys() - signature.parameters

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, default in added.items():
            object.__setattr__(self, name, kwargs.pop(name, list(default) if default == () else default))
        for name in gone & kwargs.keys():
            refuse_gone(name, kwargs[name])
        original(self, *args, **kwargs)

    keyword, present = inspect.Parameter.KEYWORD_ONLY, list(signature.parameters.values())
    further = [inspect.Parameter(name, keyword, default=default) for name, default in added.items()]
    end = len(present) - any(p.kind is inspect.Parameter.VAR_KEYWORD for p in present)
    vars(__init__)["__signature__"] = signature.replace(parameters=[*present[:end], *further, *present[end:]])
    return __init__


def give_defaults(defaults: Mapping[str, Any], owner: Any) -> Callable[[], None]:
    """Give a config, or a provider's class for objects of before, the defaults; returns what takes them away."""
    added = {name: default for name, default in defaults.items() if not hasattr(owner, name)}
    for name, default in added.items():
        setattr(owner, name, default)

    def take_away() -> None:
        for name, default in added.items():
            if vars(owner).get(name) is default:
                delattr(owner, name)

    return take_away


def _field(name: str, default: Any) -> dataclasses.Field[Any]:
    made: Any = dataclasses.field(default_factory=list) if default == () else dataclasses.field(default=default)
    made.name, made.type = name, Any
    made._field_type = dataclasses._FIELD  # type: ignore[attr-defined]  # the mark of a field has no public name
    made.kw_only = True  # providers that are derived later take it by keyword, wherever their own fields stand
    field: dataclasses.Field[Any] = made
    return field


def _patches(init: Seam, fields: Seam, defaults: Mapping[str, Any]) -> tuple[Patch, Patch]:
    accepting = functools.partial(accepting_init, defaults=defaults)
    extend = functools.partial(extended_fields, defaults=defaults)
    return Patch(init, accepting), Patch(fields, extend, extra=functools.partial(give_defaults, defaults))


def _known(provider: str, defaults: Mapping[str, Any]) -> tuple[Patch, Patch]:
    return _patches(seam(f"{provider}.init"), seam(f"{provider}.fields"), defaults)


PATCHES = (
    *(patch for _, provider, _ in LANGUAGE_MODELS for patch in _known(provider, LANGUAGE_MODEL_DEFAULTS)),
    *(patch for _, provider in PROVIDERS for patch in _known(provider, EVERY)),
    *(patch for place in other_providers() for patch in _patches(*field_seams(*place), EVERY)),
)


def _values_here(options: GraphOptions, model: Any) -> dict[str, Any]:
    """Return the fields, with plain values, that say these options to a config object of the installed release.

    Raises:
        OptionError: The installed Bridge is too old, or it, or this config, cannot do what an option asks for.
    """
    if why := too_old(bridge_release()):
        raise OptionError.because("megatron-bridge", f"Cannot use graph options: {why}.")
    from megatron.bridge.utils import cuda_graph

    fields = [name for name in (*FIELDS, TE_RNG) if hasattr(model, name)]
    release = f"megatron-bridge {bridge_release()} (megatron-core {core_release()})"
    trains_local_layers = not hasattr(cuda_graph, "validate_cuda_graph_configuration")
    return field_values(options, fields, "" if trains_local_layers else release)


def apply_options(options: GraphOptions, config: Any, facts: Facts | None = None) -> None:
    """Set options on a model's config object, or on a whole configuration, in the installed release's own fields.

    Every field has its final type at once. With a whole configuration the random-state tracker that graphs need is
    switched on in both of its places, and the NaN check of the loss off for graphs of the whole step.

    Args:
        options: The options.
        config: What gets them.
        facts: Other settings, for combinations with them.

    Raises:
        OptionError: The options cannot work, or this release cannot do them; nothing was set.
    """
    model = getattr(config, "model", None) or config
    # First, as no combination with a field that the model lacks is of help.
    values = {name: _typed(name, value) for name, value in _values_here(options, model).items()}
    check_options(options, facts)
    for name, value in values.items():
        setattr(model, name, value)
    rng: Any = getattr(config, "rng", None)
    if options.enabled and hasattr(rng, "te_rng_tracker"):
        rng.te_rng_tracker = True
    if options.language_model.impl == "full_iteration" and hasattr(config, "rerun_state_machine"):
        config.rerun_state_machine.check_for_nan_in_loss = False
    if options.chosen and options.packed.enabled:
        _pad_offline_packs(config)
    setattr(model, APPLIED, options)
    warn_of_options(options)


def set_graphs(config: Any, *sources: Any) -> GraphOptions:
    """Set what a configuration and further sources, later ones winning, come to; returns all graph options of it.

    What else of the configuration forbids graphs is not looked at: Bridge's validation does so, with the plugin's
    check, when all of it is known.

    Args:
        config: A Bridge `ConfigContainer`.
        sources: Fields of the model and what was written; see `options.graph_options`.

    Raises:
        OptionError: The options cannot work; nothing was set.
    """
    options = normalize(collect_for_start(config), *sources)[0]
    apply_options(options, config)
    return options


def applied(model: Any, options: GraphOptions | None = None) -> GraphOptions:
    """Return the options of a model's config with what the one setting came to, where they are as it set them.

    Args:
        model: The config.
        options: What its fields hold now, where that is known.
    """
    told = getattr(model, APPLIED, None)
    if told is None:
        return options or GraphOptions()
    return told if options is None or replace(options, choice=told.choice) == told else options


def announce_parts(model: Any, options: GraphOptions | None = None, names: Collection[str] | None = None) -> None:
    """Print once what of a model is on graphs, what not, and why; warn of fields that look like misspelt options.

    Args:
        model: The model's config.
        options: What its fields hold.
        names: The parts that the model has; None takes those that its config has fields of.
    """
    names = PARTS[not hasattr(model, VISION_IMPL) :] if names is None else names
    line = in_one_line(applied(model, options), names)
    if not _told.is_new(model, line):
        return
    announce(line)
    for name, meant in misspelt(model).items():
        warn(f"{name} of the model's configuration is no field, and has no effect. Did you mean {meant}?")


def _pad_offline_packs(config: Any) -> None:
    """Have data that are packed offline padded to one length, as Bridge asks where graphs are on."""
    dataset = getattr(config, "dataset", None)
    specs = getattr(dataset, "offline_packing_specs", None)
    if dataset is not None and specs is not None:
        dataset.pad_to_max_length = specs.pad_cu_seqlens = True


@contextlib.contextmanager
def graph_options_overridden(config: Any, *sources: Any) -> Iterator[GraphOptions]:
    """Change graph options of a config object inside a `with` block, for evaluation, generation or roll-outs.

    Every graph field has its value back afterwards, absent ones are absent again, also after an exception.

    Args:
        config: A model's config object or a whole configuration.
        sources: What to change, in any spelling; see `graph_options`.

    Raises:
        OptionError: The changed options cannot work; nothing was changed.
    """
    wanted = graph_options(config, *sources)
    targets = [getattr(config, "model", None) or config, getattr(config, "rng", None)]
    names = (*FIELDS, APPLIED, TE_RNG, "te_rng_tracker")
    before = [(vars(t), {name: vars(t)[name] for name in names if name in vars(t)}) for t in targets if t is not None]
    try:
        apply_options(wanted, config)
        yield wanted
    finally:
        for attributes, values in before:
            for name in names:
                attributes.pop(name, None)
            attributes.update(values)


@contextlib.contextmanager
def inference_graphs(config: Any) -> Iterator[GraphOptions]:
    """Give a config object, inside a `with` block, the graph options that inference can use.

    Only impl local has inference graphs. Every other implementation is off inside the block, so inference makes no
    warm-up passes whose graphs are never captured.
    """
    options = normalize(config)[0]
    language_model = options.language_model
    if language_model.impl != "local":
        language_model = LanguageModelGraphOptions()
    wanted = GraphOptions(language_model=language_model, vision=options.vision)
    with graph_options_overridden(config, wanted) as applied:
        yield applied


def _typed(name: str, value: Any) -> Any:
    from megatron.core.transformer import enums

    if name == MODULES:
        return [enums.CudaGraphModule[module] for module in value]
    if name == INFERENCE:
        return enums.InferenceCudaGraphScope[value]
    return value


def collect_for_start(config: Any) -> Written:
    """Return what a configuration holds as `collect` does, with the precision that Bridge's start will set.

    Args:
        config: A Bridge `ConfigContainer`, or a model's config object.
    """
    held = collect(config)
    precision = _named(getattr(config, "mixed_precision", None))
    settings = {name: getattr(precision, name) for name in SETTINGS if hasattr(precision, name)}
    return replace(held, settings={**held.settings, **settings})


def _named(precision: Any) -> Any:
    """Return the settings that a name stands for; None if Bridge has no such name, which it refuses itself."""
    if not isinstance(precision, str):
        return precision
    from megatron.bridge.training.mixed_precision import get_mixed_precision_config

    try:
        return get_mixed_precision_config(precision)
    except ValueError:
        return None


WARMUP = "cuda_graph_warmup_steps"
# What Bridge's recipes write while graphs of the language model are off.
_IDLE = ("none", "full", False)


def apply_environment(config: Any) -> bool:
    """Set the options of the environment on a configuration's model, as `environment_options`; returns whether any.

    Args:
        config: A Bridge `ConfigContainer`.

    Raises:
        OptionError: The variable has a word that is no option, or its options cannot work with the configuration.
    """
    if not hasattr(config, "model"):
        return False
    with environment_options(config.model) as said:
        fields = {name: value for name, value in said.items() if name != WARMUP}
        if said:
            set_graphs(config, Written(fields))
        if WARMUP in said:
            config.model.cuda_graph_warmup_steps = said[WARMUP]
    return bool(said)


@contextlib.contextmanager
def environment_options(model: Any) -> Iterator[dict[str, Any]]:
    """Give a block the options of the environment that a model's config leaves at their default values, by field.

    Fields that the config does not have are left out, as one variable is for every model of a job. The block applies
    the options, which are printed then.

    Raises:
        OptionError: The variable has a word that is no option, or the block refuses its options.
    """
    words = os.environ.get(OPTIONS)
    taken = None
    try:
        taken, left = _taken(model, collect(words)) if words else ({}, [])
        yield taken
    except OptionError as error:
        if taken != {}:
            error.add_note(f"The environment variable {OPTIONS} says so.")
        raise
    if taken:
        listed = ", ".join(f"{name}={value}" for name, value in taken.items())
        announce(f"{OPTIONS} sets {listed}" + (f"; set already: {', '.join(left)}" if left else ""))


def _taken(model: Any, said: Written) -> tuple[dict[str, Any], list[str]]:
    """Return what a config takes of what the environment says, and the fields that it has set already."""
    if OFFLOADS in said.settings:
        why = f"Cannot use {OFFLOADS} here: it is a field of megatron-core's. Set it on the model."
        raise OptionError.because(OFFLOADS, why)
    kept = _explicit_fields(model)
    known = [name for name in said.fields if hasattr(model, name)]
    taken = {name: said.fields[name] for name in known if kept.isdisjoint(set_together(name))}
    warm_up = said.facts[WARMUP]
    steps = {} if warm_up is None or WARMUP in kept else {WARMUP: warm_up}
    return {**taken, **steps}, [name for name in known if name not in taken]


def _explicit_fields(model: Any) -> set[str]:
    """Return the graph fields that have other values than their defaults."""
    held = {**fields_of(model), WARMUP: getattr(model, WARMUP, None)}
    defaults = {name: getattr(type(model), name, EVERY.get(name)) for name in held}
    return {name for name, value in held.items() if not (is_unset(value) or _is_idle(name, value, defaults[name]))}


def _is_idle(name: str, value: Any, default: Any) -> bool:
    idle = name in LANGUAGE_MODEL_FIELDS and (value in _IDLE or not value)
    return idle or value == default or not (value or default)
