"""Graph options, the environment's too, on config objects of the installed release: apply, read, change for a while."""

import dataclasses
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ...announce import WIDTH, announce
from ...options import GraphOptions, OptionError, check_options, graph_options, normalize
from ...options.explain import chosen_table
from ...options.facts import OFFLOADS
from ...options.graph_options import SETTING, TE_RNG, Release, field_values, tuning_of
from ...options.language_model import INFERENCE, MODULES, SCOPE, LanguageModelGraphOptions
from ...options.sources import ATTRIBUTES, LANGUAGE_MODEL_FIELDS, SETTINGS, Written, collect, fields_of, set_together
from ...options.values import is_unset
from ..environment import OPTIONS
from ..seams.patches import bridge_release
from ..seams.releases import too_old
from .provider_fields import EVERY

_ABSENT = object()


def describe_release(model: Any) -> Release:
    """Return what this config object can say, found by looking at it and at the installed Bridge.

    Raises:
        OptionError: The installed Bridge is too old.
    """
    if why := too_old(bridge_release()):
        raise OptionError.because("megatron-bridge", f"Cannot use graph options: {why}.")
    fields = frozenset(name for name in (*ATTRIBUTES, TE_RNG) if hasattr(model, name))
    versions = {name: importlib.metadata.version(name) for name in ("megatron-bridge", "megatron-core")}
    return Release(
        name=f"megatron-bridge {versions['megatron-bridge']} (megatron-core {versions['megatron-core']})",
        fields=fields,
        local_layers=_trains_local_layers(),
    )


def _trains_local_layers() -> bool:
    from megatron.bridge.utils import cuda_graph

    return not hasattr(cuda_graph, "validate_cuda_graph_configuration")


def apply_options(options: GraphOptions, config: Any) -> None:
    """Set options on a model's config object, or on a whole configuration, in the installed release's own fields.

    Every field has its final type at once. With a whole configuration the random-state tracker that graphs need is
    switched on in both of its places, and the NaN check of the loss off for graphs of the whole step.

    Raises:
        OptionError: The options cannot work, or this release cannot do them; nothing was set.
    """
    check_options(options)
    model = getattr(config, "model", None) or config
    told = field_values(options, describe_release(model))
    values = {name: _typed(name, value) for name, value in told.items()}
    for name, value in values.items():
        setattr(model, name, value)
    rng: Any = getattr(config, "rng", None)
    if options.enabled and hasattr(rng, "te_rng_tracker"):
        rng.te_rng_tracker = True
    if options.language_model.impl == "full_iteration" and hasattr(config, "rerun_state_machine"):
        config.rerun_state_machine.check_for_nan_in_loss = False
    if options.chosen:
        _apply_choice(options, config)


def _apply_choice(options: GraphOptions, config: Any) -> None:
    """Pad packed data where the one setting puts packs on graphs, and tell what it came to."""
    if options.packed.enabled:
        _pad_offline_packs(config)
    setting = options.choice.setting
    if setting == "off":
        announce(f"{SETTING}: {options.chosen[0]}")
    elif hasattr(config, "model"):
        announce(chosen_table(options, WIDTH))
    else:
        announce(f"{SETTING}={setting}: {'; '.join(map(str, options.chosen))}")


def _pad_offline_packs(config: Any) -> None:
    """Have data that are packed offline padded to one length, as Bridge asks where graphs are on."""
    dataset = getattr(config, "dataset", None)
    specs = getattr(dataset, "offline_packing_specs", None)
    if dataset is not None and specs is not None:
        dataset.pad_to_max_length = specs.pad_cu_seqlens = True


def read_options(config: Any) -> GraphOptions:
    """Return the options that a config object of any release holds.

    Raises:
        OptionError: It holds a value that does not exist, or two that disagree.
    """
    return normalize(config)[0]


@contextmanager
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
    names = (*ATTRIBUTES, TE_RNG, "te_rng_tracker")
    before = [(vars(t), {name: vars(t).get(name, _ABSENT) for name in names}) for t in targets if t is not None]
    try:
        apply_options(wanted, config)
        yield wanted
    finally:
        for attributes, values in before:
            _restore(attributes, values)


def _restore(attributes: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is _ABSENT:
            attributes.pop(name, None)
        else:
            attributes[name] = value


@contextmanager
def inference_graphs(config: Any) -> Iterator[GraphOptions]:
    """Give a config object, inside a `with` block, the graph options that inference can use.

    Only impl local has inference graphs. Every other implementation is off inside the block, so inference makes no
    warm-up passes whose graphs are never captured.
    """
    options = read_options(config)
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
    if name == SCOPE and value is not None:
        return [enums.CudaGraphScope[module] for module in value]
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
    """Set the options of the environment on fields of the model that have their default values; returns whether it did.

    Fields that the model does not have are left out, as one variable is for every model of a job.

    Args:
        config: A Bridge `ConfigContainer`.

    Raises:
        OptionError: The variable has a word that is no option, or its options cannot work with the configuration.
    """

    def apply(fields: dict[str, Any], steps: dict[str, int]) -> None:
        apply_options(normalize(collect_for_start(config), Written(fields))[0], config)
        for name, value in steps.items():
            setattr(config.model, name, value)

    return hasattr(config, "model") and take_environment(config.model, apply)


def take_environment(model: Any, apply: Callable[[dict[str, Any], dict[str, int]], None]) -> bool:
    """Have the options of the environment applied that a model's config leaves at their default values.

    Args:
        model: The config.
        apply: Sets graph fields, and warm-up steps, by name.

    Returns:
        Whether there were any.

    Raises:
        OptionError: The variable has a word that is no option, or its options cannot work with the config.
    """
    words = os.environ.get(OPTIONS)
    if not words:
        return False
    try:
        return _take(model, collect(words), apply)
    except OptionError as error:
        error.add_note(f"The environment variable {OPTIONS} says so.")
        raise


def _take(model: Any, said: Written, apply: Callable[[dict[str, Any], dict[str, int]], None]) -> bool:
    if OFFLOADS in said.settings:
        why = f"Cannot use {OFFLOADS} here: it is a field of megatron-core's. Set it on the model."
        raise OptionError.because(OFFLOADS, why)
    kept = _explicit_fields(model)
    known = [name for name in said.fields if hasattr(model, tuning_of(name) or name)]
    taken = {name: said.fields[name] for name in known if kept.isdisjoint(set_together(name))}
    warm_up = said.facts[WARMUP]
    steps = {} if warm_up is None or WARMUP in kept else {WARMUP: warm_up}
    if not taken and not steps:
        return False
    apply(taken, steps)
    left = [name for name in known if name not in taken]
    announce(f"{OPTIONS} sets {_listed({**taken, **steps})}" + (f"; set already: {', '.join(left)}" if left else ""))
    return True


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _explicit_fields(model: Any) -> set[str]:
    """Return the graph fields, and keys of mappings, that have other values than their defaults."""
    defaults = {**EVERY, **dict(_defaults(dataclasses.fields(model) if dataclasses.is_dataclass(model) else ()))}
    held = {**fields_of(model), WARMUP: getattr(model, WARMUP, None)}
    return {name for name, value in held.items() if not is_unset(value) and not _is_default(name, value, defaults)}


def _is_default(name: str, value: Any, defaults: dict[str, Any]) -> bool:
    if name in LANGUAGE_MODEL_FIELDS and (value in _IDLE or not value):
        return True
    return name in defaults and (value == defaults[name] or (not value and not defaults[name]))


def _defaults(fields: Iterable[dataclasses.Field[Any]]) -> Iterable[tuple[str, Any]]:
    for one in fields:
        if one.default is not dataclasses.MISSING:
            yield one.name, one.default
        elif one.default_factory is not dataclasses.MISSING:
            yield one.name, one.default_factory()
