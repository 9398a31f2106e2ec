"""Which of a region's sources the model is now: what a replay must find unchanged, and what follows where it is not."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..announce import announce, warn
from .errors import CaptureError
from .fallback import Fallback
from .gradients import ParameterHooks, Reduction
from .model_watch import MISSING, Entry, ModelWatch, token
from .modules import every_module
from .program import RegionProgram
from .source import Source, State, autocast_dtype

# Microbatches of one state after which it gets recordings of its own: it lasts, or comes back.
LASTING = 2
# States whose recordings are kept, and after how many new ones a model is taken to change all the time.
MOST_SOURCES, MOST_ADOPTED = 4, 16


class Sources:
    """Everything that a region's recordings were made from.

    Args:
        program: The piece of the model.
        watch: Follows the model.
        device: Where the region runs.
        reduction: What waits for gradients; None hands every gradient over to autograd.

    Attributes:
        current: The source that was found last.
    """

    def __init__(
        self, program: RegionProgram, watch: ModelWatch, device: torch.device, reduction: Reduction | None
    ) -> None:
        self._program, self._watch, self._reduction = program, watch, reduction
        self._device_type = device.type
        # A part's forward also reads attributes of the layer that it belongs to.
        self._holders = watch.holders(every_module(program.modules()))
        self._hooks = ParameterHooks()
        self._asked: Counter[Hashable] = Counter()
        self._adopted = 0
        self._warned: set[str] = set()
        self._looks_once = self._looked = False
        self._found_at: tuple[int, torch.dtype | None] | None = None
        self._state_at: tuple[int, State, list[Entry]] | None = None
        if watch.foreign_hook is not None:
            raise CaptureError(f"{watch.foreign_hook}, which a graph would not run; remove it before capture")
        self.current = self._new(lasting=False)
        self._all = [self.current]

    def __iter__(self) -> Iterator[Source]:
        return iter(self._all)

    def release(self) -> None:
        """Take hooks off the parameters and drop all recordings."""
        self._hooks.release()
        self._all = []

    def clear(self) -> None:
        """Take back the flags that replays set on parameters."""
        self._hooks.clear()

    @property
    def training(self) -> bool | tuple[bool, ...]:
        """The mode that the modules are in; see `Mode`."""
        return self._watch.training

    @contextmanager
    def memory_kept(self) -> Iterator[None]:
        """Inside, as in a training step, memory stays where the first look finds it: only that one looks."""
        self._looks_once = True
        try:
            yield
        finally:
            self._looks_once = self._looked = False

    def find(self, gradients: bool, idle: Callable[[], bool]) -> Source | Fallback:
        """Return the source that the model is now, or why there is none.

        Args:
            gradients: Whether a backward may follow.
            idle: Whether no microbatch is between its forward and its backward, so that recordings may be dropped.
        """
        autocast = autocast_dtype(self._device_type)
        if self._found_at == (self._watch.generation, autocast):
            found = self._as_recorded(self.current, gradients, idle)
            if found is not None:
                return found
        return self._look_around(autocast, gradients, idle)

    def _look_around(
        self, autocast: torch.dtype | None, gradients: bool, idle: Callable[[], bool]
    ) -> Source | Fallback:
        """Return what `find` does, without what it found last."""
        if self._watch.foreign_hook is not None:
            self._warn(Fallback.FORWARD_HOOKS, f"{self._watch.foreign_hook}, which a graph would not run")
            return Fallback.FORWARD_HOOKS
        state = self._state()
        for source in self._all:
            if source.state == state and source.autocast == autocast:
                found = self._as_recorded(source, gradients, idle)
                if found is not None:
                    return found
        return self._ask(state, autocast)

    def holds(self, source: Source) -> bool:
        """Whether a backward may be replayed: memory lies where it was, and nobody put a hook on a parameter since."""
        return self._looked or not (source.moved(gradients=True) or source.sinks.hooked_otherwise())

    def _as_recorded(self, source: Source, gradients: bool, idle: Callable[[], bool]) -> Source | Fallback | None:
        """Return a source of the model's state, why it cannot be used now, None if something else changed."""
        if gradients and source.sinks.hooked_otherwise():
            return None
        if self._looked and source is self.current:
            return source
        if source.aliases.trained_otherwise():
            return None
        if source.moved(gradients):
            if not idle():
                self._warn(Fallback.MEMORY_MOVED, "memory of parameters or of their main_grad was moved inside a step")
                return Fallback.MEMORY_MOVED
            source = self._instead_of(source)
        self._looked = self._looks_once and gradients
        self._choose(source)
        return source

    def _choose(self, source: Source) -> None:
        self.current = source
        self._found_at = self._watch.generation, source.autocast

    def _instead_of(self, stale: Source) -> Source:
        """Return a source like one whose memory was moved, without recordings."""
        stale.recordings.clear()
        fresh = self._new()
        self._all[self._all.index(stale)] = fresh
        return fresh

    def _state(self) -> State:
        return self._look()[1]

    def _look(self) -> tuple[int, State, list[Entry]]:
        if self._state_at is None or self._state_at[0] != self._watch.generation:
            differences = self._watch.differences()
            tables = self._watch.tables_of(self._modules()) if differences else ()
            own = [place for place in differences if place.table in tables]
            state = frozenset((place, token(differences[place])) for place in own)
            self._state_at = self._watch.generation, state, own
        return self._state_at

    def _modules(self) -> list[nn.Module]:
        """Return the modules whose own attributes and tensors the piece may read."""
        return [*self._holders, *every_module(self._program.modules())]

    def _new(self, lasting: bool = True) -> Source:
        _, state, places = self._look()
        differences = self._watch.differences()
        held = [value for place in places if (value := differences[place]) is not MISSING]
        with torch.inference_mode(False):
            return Source(
                self._program,
                state,
                autocast_dtype(self._device_type),
                self._reduction,
                self._hooks,
                self._watch.tensors_of(self._modules()),
                held,
                lasting,
            )

    def _ask(self, state: State, autocast: torch.dtype | None) -> Source | Fallback:
        """Return recordings' new source once the model has been asked for in this state often enough."""
        reason, what = self._reason(state, autocast)
        if self._adopted >= MOST_ADOPTED:
            self._warn("all the time", f"the model changes all the time, last: {what}", lasts=False)
            return reason
        key = (state, autocast, self._trained(), self._hooks.foreign())
        self._asked[key] += 1
        self._warn(what, what)
        if self._asked[key] < LASTING:
            return reason
        self._adopted += 1
        fresh = self._new()
        self._all = [*self._all[-MOST_SOURCES + 1 :], fresh]
        self._choose(fresh)
        announce(f"{self._program.name}: graphs are captured for this state of the model as well: {what}")
        return fresh

    def _trained(self) -> frozenset[nn.Parameter]:
        modules = every_module(self._program.modules())
        return frozenset(p for m in modules for p in m._parameters.values() if p is not None and p.requires_grad)

    def _reason(self, state: State, autocast: torch.dtype | None) -> tuple[Fallback, str]:
        """Return why no source describes the model, as a reason and in words."""
        alike = [source for source in self._all if source.state == state]
        if not alike:
            changes = self._watch.described(self._look()[2])
            return Fallback.MODEL_CHANGED, changes or "the model is as when its watch began"
        alike = [source for source in alike if source.autocast == autocast]
        if not alike:
            return Fallback.AUTOCAST_CHANGED, f"autocast is {autocast or 'off'}"
        if all(source.aliases.trained_otherwise() for source in alike):
            return Fallback.PARAMETERS_CHANGED, "other parameters require a gradient"
        return Fallback.PARAMETER_HOOKS, "other parameters have a hook"

    def _warn(self, what: str, text: str, lasts: bool = True) -> None:
        """Say something once."""
        if what not in self._warned and (not lasts or len(self._warned) < MOST_ADOPTED):
            self._warned.add(what)
            after = "graphs of its own are captured if this lasts" if lasts else "eager from now on"
            warn(f"{self._program.name}: {text}; microbatches run eager, {after}")
