"""Graphs in a training loop that calls megatron-core's schedules itself, as those of RL post-training do.

Every loop looks a schedule up when it calls it, so what stands in for the schedules meets them all. A model whose
config asks for graphs gets helpers at its first call; each call is a step. Models that Bridge's own loop trains are
left to it.
"""

import atexit
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ...graphs.joint_step import before_evaluation
from ...options.graph_options import SETTING
from ..environment import OPTIONS
from ..seams.activation import before_deactivation
from ..seams.patches import Patch, arguments_of
from ..seams.registry import seam
from ..seams.registry.training import SCHEDULES
from ..wrappers import chunks_of, config_of, unwrapped
from .graph_helper import (
    active_graphs,
    asks_for_packed_graphs,
    asks_for_vision_graphs,
    modules_on_graphs,
)

if TYPE_CHECKING:
    from .loop_driver import LoopDriver


# Attribute of a model's first chunk without wrappers: a loop may put others around it, or none, for each call.
HELD = "_bridge_cg_loop"


class _Held:
    """A model's driver as an attribute of its first chunk, under any wrapper: both go when the loop drops the model.

    A driver refers to its model, so a table of this process would keep both. A copy of the model has no driver.
    """

    def __init__(self, driver: "LoopDriver | None" = None) -> None:
        self.driver = driver

    def __reduce__(self) -> tuple[type["_Held"], tuple[()]]:
        return _Held, ()


class Loops:
    """The drivers of this process's models."""

    def __init__(self) -> None:
        self._drivers: weakref.WeakSet[LoopDriver] = weakref.WeakSet()
        self._bridges: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._met: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._told: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def driver_of(self, model: nn.Module | Sequence[nn.Module], microbatches: int) -> "LoopDriver | None":
        """Return what drives a model's graphs; None where nothing of it is on graphs, or somebody else does.

        Raises:
            OptionError: An option cannot work.
        """
        chunks = chunks_of(model)
        if chunks[0] in self._bridges:
            return None
        driver = self._known(chunks[0])
        if driver is not None:
            if driver.serves(chunks):
                return driver
            self._end(driver)
        if chunks[0] not in self._met:
            self._met.add(chunks[0])
            self.tell(chunks)
        config = config_of(chunks)
        if not (asks_for_vision_graphs(config) or asks_for_packed_graphs(config)):
            return None
        others = modules_on_graphs(chunks)
        if others and not others <= {graphs.model for driver in self._drivers for graphs in driver.graphs}:
            return None
        from ..environment import memory_may_leave
        from .leaving_models import follow
        from .loop_driver import LoopDriver

        driver = LoopDriver(chunks, config, microbatches, others)
        self._drivers.add(driver)
        if memory_may_leave():
            follow(chunks, self.follow_models)
        vars(unwrapped(chunks[0])[-1])[HELD] = _Held(driver)
        return driver

    def _known(self, first: nn.Module) -> "LoopDriver | None":
        held = vars(unwrapped(first)[-1]).get(HELD)
        return held.driver if held is not None and held.driver in self._drivers else None

    def _end(self, driver: "LoopDriver") -> None:
        self._drivers.discard(driver)
        driver.end()

    def tell(self, model: nn.Module | Sequence[nn.Module]) -> None:
        """Set what the environment and the one setting of a model's config come to on this config, once.

        Raises:
            OptionError: They cannot work, or the model has no config.
        """
        config = config_of(model)
        asked = getattr(config, SETTING, None) is not None
        if not (asked or os.environ.get(OPTIONS)) or (config is not None and self._told.get(id(config)) is config):
            return
        from .graph_fields import take_environment
        from .loop_driver import graph_config, set_options

        config = graph_config(model)
        self._told[id(config)] = config
        taken = take_environment(config, lambda fields, steps: set_options(model, config, {**fields, **steps}))
        if asked and not taken:
            set_options(model, config)

    def set(self, model: nn.Module | Sequence[nn.Module], *options: Any) -> None:
        """Set graph options on a model's config; drops graphs of other options. See `bridge_cg_plugin.enable`."""
        from .loop_driver import graph_config, set_options

        config = graph_config(model)
        self.tell(model)
        set_options(model, config, *options)
        self._told[id(config)] = config
        for driver in [driver for driver in self._drivers if driver.config is config and driver.is_outdated()]:
            self._end(driver)  # the model's next call begins anew

    def leave_to_bridge(self, model: nn.Module | Sequence[nn.Module]) -> None:
        """Stand back from a model that Bridge's own loop trains."""
        if (chunks := chunks_of(model)) and not self.is_bridges(chunks):
            self._bridges.add(chunks[0])
            if (driver := self._known(chunks[0])) is not None:
                self._end(driver)

    def is_bridges(self, model: nn.Module | Sequence[nn.Module]) -> bool:
        """Whether Bridge's own loop trains a model."""
        return chunks_of(model)[0] in self._bridges

    def release_memory(self) -> int:
        """Take the memory of all models' graphs off the device until they are needed; returns how many bytes left."""
        from .leaving_models import undisturbed

        with undisturbed():
            return sum(driver.release_memory() for driver in list(self._drivers))

    def follow_models(self) -> None:
        """Take the memory of graphs off the device whose model has left it."""
        for driver in list(self._drivers):
            driver.follow_models()

    def report(self) -> None:
        """Print the reports of all graphs."""
        for driver in self._drivers:
            driver.report()

    def forget(self) -> None:
        """Drop all drivers, whose graphs somebody else has dropped."""
        self._drivers.clear()
        self._bridges.clear()
        self._met.clear()
        self._told.clear()


LOOPS = Loops()
atexit.register(LOOPS.report)
before_deactivation(LOOPS.forget)


def _with_graphs(name: str, old: Callable[..., Any]) -> Callable[..., Any]:
    argument = arguments_of(seam(name), old)

    @functools.wraps(old)
    def schedule(*args: Any, **kwargs: Any) -> Any:
        model = argument("model", args, kwargs)
        driver = LOOPS.driver_of(model, argument("num_microbatches", args, kwargs))
        if driver is None:
            if argument("forward_only", args, kwargs) and LOOPS.is_bridges(model):
                before_evaluation(active_graphs())
            return old(*args, **kwargs)
        with driver.step():
            return old(*args, **kwargs)

    return schedule


PATCHES = tuple(Patch(seam(name), functools.partial(_with_graphs, name)) for name in SCHEDULES)
