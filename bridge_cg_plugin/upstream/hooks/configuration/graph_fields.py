"""Graph options on the config objects of the installed release: apply, read back, change for a while."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ....announce import WIDTH, announce
from ....options import GraphOptions, OptionError, check_options, graph_options, normalize
from ....options.choice import SETTING
from ....options.explain import chosen_table
from ....options.language_model import INFERENCE, MODULES, SCOPE, LanguageModelGraphOptions
from ....options.releases import RELEASES, TE_RNG, Release, field_values
from ....options.sources import ATTRIBUTES
from ...seams.patches import bridge_release
from ...seams.releases import too_old

_ABSENT = object()


def describe_release(model: Any) -> Release:
    """Return what this config object can say, found by looking at it and at the installed Bridge.

    Raises:
        OptionError: The installed Bridge is too old.
    """
    if why := too_old(bridge_release()):
        raise OptionError.because("megatron-bridge", f"Cannot use graph options: {why}.")
    fields = frozenset(name for name in (*ATTRIBUTES, TE_RNG) if hasattr(model, name))
    known = next((r for r in RELEASES if r.fields - {TE_RNG} <= fields), RELEASES[0])
    versions = {name: importlib.metadata.version(name) for name in ("megatron-bridge", "megatron-core")}
    return Release(
        name=f"megatron-bridge {versions['megatron-bridge']} (megatron-core {versions['megatron-core']})",
        fields=fields,
        local_layers=_trains_local_layers(),
        offload_modules=known.offload_modules,
    )


def _trains_local_layers() -> bool:
    from megatron.bridge.utils import cuda_graph

    return not hasattr(cuda_graph, "validate_cuda_graph_configuration")


def apply_options(options: GraphOptions, config: Any) -> None:
    """Set options on a model's config object, or on a whole configuration, in the installed release's own fields.

    Every field has its final type at once. With a whole configuration the random-state tracker that graphs need is
    switched on in both of its places.

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
    if options.chosen:
        _apply_choice(options, config)


def _apply_choice(options: GraphOptions, config: Any) -> None:
    """Set what else of a configuration the one setting needs, and tell what it came to."""
    if options.language_model.impl == "full_iteration" and hasattr(config, "rerun_state_machine"):
        config.rerun_state_machine.check_for_nan_in_loss = False
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
    wanted = GraphOptions(language_model=language_model, vision=options.vision, offload=options.offload)
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
