"""What drives graphs in every training loop: one driver for each model, which begins and ends its steps.

In Bridge's own loop a step is the loop's (`train_loop`). In others, as those of RL post-training, each call of a
megatron-core schedule is one: every loop looks a schedule up when it calls it, so what stands in for the schedules
meets them all. A model whose config asks for graphs gets them at its first step.
"""

import atexit
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from ...announce import Told, announce, warn, warn_once
from ...graphs.instance import every_module
from ...graphs.manager import GraphManager
from ...options import GraphOptions, LanguageModelGraphOptions, OptionError, graph_options
from ...options.combinations import DRIVEN_BY_BRIDGE, padded_rows
from ...options.facts import LOOP_PARTS
from ...options.graph_options import (
    LANGUAGE_MODEL_PART,
    SETTING,
    VISION_ENCODER,
    Part,
    asks_for_graphs,
    asks_for_packed_graphs,
    asks_for_vision_graphs,
)
from ...options.language_model import IMPL
from ...options.normalization import held_options
from ...options.sources import Written, collect
from ..encoders.registry import find_encoders
from ..environment import OPTIONS, memory_may_leave
from ..parallel.data_parallel import data_parallel
from ..parallel.process_groups import stages_of
from ..seams.activation import before_deactivation
from ..seams.patches import Patch
from ..seams.registry import seam
from ..seams.registry.bridge import SCHEDULES
from ..wrappers import chunks_of, config_of, unwrapped
from .graph_fields import EVERY, announce_parts, applied, apply_options, environment_options, give_defaults
from .helpers.constructors import checked_options, decoder_helpers, encoder_helper, encoder_options, find_decoders
from .helpers.graph_helper import GraphHelper, active_graphs, drop_graphs
from .leaving_models import ReturningBuffers, follow, has_left, undisturbed

LAYERS = seam("packed_layers")
# Schedule calls that run eager before graphs are captured, where the model's config does not say.
WARMUP_CALLS = 3


def graph_config(model: nn.Module | Sequence[nn.Module]) -> Any:
    """Return the config of a model, with all fields of graph options.

    Raises:
        OptionError: The model has none.
    """
    config = config_of(model)
    if config is None:
        first = next(iter(chunks_of(model)), model)
        why = f"{type(first).__name__} has no config of megatron-core. Pass the model itself."
        raise OptionError.because("model", f"Cannot enable graphs: {why}")
    give_defaults(EVERY, config)
    return config


def set_options(model: nn.Module | Sequence[nn.Module], config: Any, *options: Any) -> None:
    """Set graph options on a model's `graph_config`; see `bridge_cg_plugin.enable`."""
    loop = Written(settings={LOOP_PARTS: _parts_of(model, config)})
    wanted = graph_options(config, loop, *options)
    apply_options(wanted, config)
    _complete_layers(model)
    steps = collect(*options).facts["cuda_graph_warmup_steps"]
    if steps is not None:
        config.cuda_graph_warmup_steps = steps


def _complete_layers(model: nn.Module | Sequence[nn.Module]) -> None:
    """Give layers that were built while graphs were off the list of megatron-core's own graphs, which is empty.

    Its constructor makes the list by the config of then, and every call of a layer looks into it by the config of now.
    """
    graphable = getattr(sys.modules.get(LAYERS.module), LAYERS.target.partition(".")[0], ())
    for module in every_module(chunks_of(model)):
        if isinstance(module, graphable) and module.config.cuda_graph_impl == "transformer_engine":
            vars(module).setdefault("cuda_graphs", [])


def _parts_of(model: nn.Module | Sequence[nn.Module], config: Any) -> tuple[str, ...]:
    """Return the parts of a model that graphs support; other stages of a pipeline may have either."""
    chunks = chunks_of(model)
    found = {VISION_ENCODER: find_encoders(chunks), LANGUAGE_MODEL_PART: find_decoders(chunks)}
    return tuple(name for name, modules in found.items() if modules or stages_of(config) > 1)


def _announce(model: nn.Module | Sequence[nn.Module]) -> None:
    """Print once what of a model this loop has on graphs, what not, and why."""
    config = config_of(model)
    if not asks_for_graphs(config):
        if config is not None:
            # What was set last, unless it has been switched off since.
            announce_parts(config, GraphOptions() if applied(config).enabled else None)
        return
    options = held_options(config)
    impl = options.language_model.impl
    if impl in DRIVEN_BY_BRIDGE and not options.packed.enabled:
        idle = Part(LANGUAGE_MODEL_PART, "eager", f"{IMPL}={impl}: only train steps of Bridge's loop drive such graphs")
        options = replace(options, language_model=LanguageModelGraphOptions(), chosen=(idle,))
    announce_parts(config, options, _parts_of(model, config))


class LoopDriver:
    """Graphs of one model over its loop's steps: makes them, warms up, captures between steps, reports.

    Args:
        chunks: The model's chunks on this rank.
        config: The model's config, with the plugin's options.
        microbatches: Of the first step; None in Bridge's own loop, whose steps have as many as its configuration says.

    Raises:
        OptionError: An option cannot work.
    """

    _reported = False
    _helpers: Sequence[GraphHelper] = ()

    def __init__(self, chunks: Sequence[nn.Module], config: Any, microbatches: int | None) -> None:
        self.config, self._bridges = config, microbatches is None
        # What Bridge's loop trains was checked with all of its configuration.
        self._options = held_options(config) if self._bridges else checked_options(config)
        self._warmup = getattr(config, "cuda_graph_warmup_steps", WARMUP_CALLS)
        self._data_parallel = data_parallel(chunks)
        rows = self._bridges and bool(padded_rows(self._options, collect(config).facts))
        self._wanted = vision, packed = asks_for_vision_graphs(config), asks_for_packed_graphs(config) or rows
        encoders, decoders = find_encoders(chunks) if vision else [], find_decoders(chunks) if packed else []
        self._found = [*(found.model for found in encoders), *decoders]
        helpers: list[GraphHelper] = []
        # A later call may have more microbatches; a pipeline holds no more than twice its stages for each chunk.
        most = 1 if microbatches is None else max(microbatches, 2 * stages_of(config) * len(chunks))
        leaves = not self._bridges and memory_may_leave()
        self._buffers = ReturningBuffers(chunks if leaves else ())
        around: Any = {"num_microbatches": most, "releasable": leaves}
        grows = not self._bridges
        for found in encoders:
            with self._else_eager(VISION_ENCODER, [found.model]):
                options = replace(encoder_options(config, found), grows=grows)
                helpers.append(encoder_helper(chunks, config, found=found, options=options, **around))
        if packed:
            _complete_layers(chunks)
            with self._else_eager(LANGUAGE_MODEL_PART, decoders, always=rows):
                packs = replace(self._options, packed=replace(self._options.packed, grows=grows))
                helpers += decoder_helpers(chunks, config, options=packs, **around)
        self._helpers = helpers
        missing = ["vision encoder"] * (vision and not encoders) + ["decoder"] * (packed and not decoders)
        if missing and stages_of(config) == 1:
            name, what = type(unwrapped(chunks[0])[-1]).__name__, " and no ".join(missing)
            warn(f"{name} has no {what} that graphs know, though its options ask for graphs of one: it runs eager")

    @contextmanager
    def _else_eager(self, part: str, modules: Sequence[nn.Module], always: bool = False) -> Iterator[None]:
        """Leave a part eager, with one warning, that the one setting chose, or any did, and this model cannot have."""
        try:
            yield
        except OptionError as error:
            for module in modules:
                drop_graphs(module)
            setting = applied(self.config).choice.setting
            if setting is None and not always:
                raise
            warn(f"{f'{SETTING}={setting}: ' if setting else ''}the {part} runs eager. {error}")

    def is_outdated(self) -> bool:
        """Whether the model's config has other options now, and no schedule call is under way."""
        return held_options(self.config) != self._options and not self._in_step

    def serves(self, chunks: Sequence[nn.Module]) -> bool:
        """Whether graphs are of what these chunks hold now, below data parallelism that replays wait for."""
        if self._in_step:
            return True
        known = all(each in self._data_parallel for each in data_parallel(chunks))
        vision, packed = self._wanted
        found = [each.model for each in find_encoders(chunks)] if vision else []
        return known and self._found == found + (find_decoders(chunks) if packed else [])

    @property
    def _in_step(self) -> bool:
        return any(each.in_step for each in self.graphs)

    @property
    def graphs(self) -> list[GraphManager]:
        """The graphs of all helpers."""
        return [helper.graphs for helper in self._helpers if helper.graphs is not None]

    def capture_due(self) -> None:
        """Capture what warm-up steps have shown enough of, and try once more what failed."""
        for helper in self._helpers:
            if helper.is_due(self._warmup):
                helper.create_cudagraphs()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Be in one step; what is due is captured before it."""
        self._buffers.put_back()
        self.capture_due()
        with ExitStack() as stack:
            for graphs in self.graphs:
                stack.enter_context(graphs.step())
            yield

    def report(self) -> None:
        """Print the graphs' reports, once: as the process ends or, where the model is dropped before, then."""
        if not self._reported:
            self._reported = True
            for graphs in self.graphs:
                announce(graphs.report())

    __del__ = report

    def end(self) -> None:
        """Report and drop the graphs."""
        for helper in self._helpers:
            helper.delete_cuda_graphs()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of the model has no driver


# Attribute of a model's first chunk, under any wrapper, that holds its driver: both go when the loop drops the model. A
# driver refers to its model, so a table of this process would keep both.
HELD = "_bridge_cg_loop"


class Loops:
    """The drivers of this process's models."""

    def __init__(self) -> None:
        self._drivers: weakref.WeakSet[LoopDriver] = weakref.WeakSet()
        self._bridges: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._met: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._settled = Told()

    def driver_of(self, model: nn.Module | Sequence[nn.Module], microbatches: int) -> LoopDriver | None:
        """Return what drives a model's graphs; None where nothing of it is on graphs, or somebody else does.

        Raises:
            OptionError: An option cannot work.
        """
        chunks = chunks_of(model)
        if chunks[0] in self._bridges:
            return None
        if chunks[0] not in self._met:
            self._met.add(chunks[0])
            self._take_settings(chunks)
            _announce(chunks)
        return self._driver(chunks, config_of(chunks), microbatches)

    def bridges_driver(self, chunks: Sequence[nn.Module], config: Any) -> LoopDriver | None:
        """Return what drives the graphs of the model that Bridge's own loop trains; no other loop drives them then.

        Graphs of another model of Bridge's, left behind by a run that ended with an error, are dropped.

        Raises:
            OptionError: An option cannot work.
        """
        if not chunks:
            self.end_bridges()
            return None
        if chunks[0] not in self._bridges:
            self.end_bridges()
            self._bridges.add(chunks[0])
            if (driver := self._known(chunks[0])) is not None:
                self._end(driver)
        return self._driver(chunks, config, None)

    def _driver(self, chunks: Sequence[nn.Module], config: Any, microbatches: int | None) -> LoopDriver | None:
        driver = self._known(chunks[0])
        if driver is not None:
            if driver.serves(chunks):
                return driver
            self._end(driver)
        bridges_own = microbatches is None and asks_for_graphs(config)
        if not (asks_for_vision_graphs(config) or asks_for_packed_graphs(config) or bridges_own):
            return None
        graphed = {graphs.model for graphs in active_graphs()}
        if graphed and not graphed.isdisjoint(module for chunk in chunks for module in chunk.modules()):
            warn_once("a model on graphs shares modules with this one, of which all others run eager")
            return None
        driver = LoopDriver(chunks, config, microbatches)
        self._drivers.add(driver)
        if microbatches is not None and memory_may_leave():
            follow(chunks, self.follow_models)
        vars(unwrapped(chunks[0])[-1])[HELD] = driver
        return driver

    def capture_bridges(self) -> None:
        """Capture what is due of what Bridge's own loop trains."""
        for driver in self._of_bridge():
            driver.capture_due()

    def end_bridges(self) -> None:
        """Report and drop the graphs of what Bridge's own loop trained."""
        for driver in self._of_bridge():
            self._end(driver)

    def _of_bridge(self) -> list[LoopDriver]:
        return [driver for chunk in list(self._bridges) if (driver := self._known(chunk)) is not None]

    def _known(self, first: nn.Module) -> LoopDriver | None:
        held = vars(unwrapped(first)[-1]).get(HELD)
        return held if held in self._drivers else None

    def _end(self, driver: LoopDriver) -> None:
        self._drivers.discard(driver)
        driver.end()

    def _take_settings(self, model: nn.Module | Sequence[nn.Module]) -> None:
        """Set what the environment and the one setting of a model's config come to on this config, once.

        Raises:
            OptionError: They cannot work, or the model has no config.
        """
        config = config_of(model)
        asked = getattr(config, SETTING, None) is not None
        if not (asked or os.environ.get(OPTIONS)):
            return
        config = graph_config(model)
        if not self._settled.is_new(config):
            return
        with environment_options(config) as said:
            if asked or said:
                set_options(model, config, said)

    def set(self, model: nn.Module | Sequence[nn.Module], *options: Any) -> None:
        """Set graph options on a model's config; drops graphs of other options. See `bridge_cg_plugin.enable`."""
        config = graph_config(model)
        self._take_settings(model)
        set_options(model, config, *options)
        self._settled.is_new(config)
        _announce(model)
        for driver in [driver for driver in self._drivers if driver.config is config and driver.is_outdated()]:
            self._end(driver)  # the model's next call begins anew

    def is_bridges(self, model: nn.Module | Sequence[nn.Module]) -> bool:
        """Whether Bridge's own loop trains a model."""
        return chunks_of(model)[0] in self._bridges

    def release_memory(self) -> int:
        """Take the memory of all models' graphs off the device until they are needed; returns how many bytes left."""
        with undisturbed():
            return sum(graphs.release_memory() for driver in list(self._drivers) for graphs in driver.graphs)

    def follow_models(self) -> None:
        """Take the memory of graphs off the device whose model has left it; inside a schedule call nothing leaves."""
        for graphs in [graphs for driver in list(self._drivers) for graphs in driver.graphs]:
            there = graphs.captured and not (graphs.in_step or graphs.executor.memory_away)
            if there and has_left(graphs.model):
                graphs.release_memory()

    def report(self) -> None:
        """Print the reports of all graphs."""
        for driver in self._drivers:
            driver.report()

    def forget(self) -> None:
        """Drop all drivers, whose graphs somebody else has dropped."""
        self._drivers.clear()
        self._bridges.clear()
        self._met.clear()
        self._settled = Told()


LOOPS = Loops()
atexit.register(LOOPS.report)
before_deactivation(LOOPS.forget)


def _with_graphs(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(old)
    def schedule(*, model: Any, num_microbatches: int, forward_only: bool = False, **others: Any) -> Any:
        driver = LOOPS.driver_of(model, num_microbatches)
        if driver is None and forward_only and LOOPS.is_bridges(model):
            for graphs in active_graphs():
                graphs.before_evaluation()
        with nullcontext() if driver is None else driver.step():
            return old(model=model, num_microbatches=num_microbatches, forward_only=forward_only, **others)

    return schedule


PATCHES = tuple(Patch(seam(name), _with_graphs) for name in SCHEDULES)
