"""Which of a region's recordings the model is now: what a replay must find unchanged, and what follows where it is not.

In a state that was recorded, the model replays. In another one it runs eager, which is said once; if that lasts, the
state is recorded as well. Up to four stay.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ...announce import announce, warn
from ..errors import CaptureError, Refused
from ..fallback import Fallback
from ..instance import every_module
from ..memory.returning import Home
from ..program import RegionProgram
from ..replays.gradients import ParameterHooks, Reduction
from .model_watch import ModelWatch
from .source import Numerics, Source, numerics_of
from .state import listed

# Microbatches of one state after which it gets recordings of its own: it lasts, or comes back.
LASTING = 2
# States whose recordings are kept. After each `MANY_ADOPTED` new ones a state must last twice as long, unless there
# were `PAYS` microbatches to each: so a model that changes all the time costs few captures, and none once it does not.
MOST_SOURCES, MANY_ADOPTED, PAYS = 4, 16, 256
# Changes that are told.
MOST_TOLD = 16
LASTS = "graphs of its own are captured if this lasts"
are_deterministic = torch._C._get_deterministic_algorithms

# Those of all regions of this process.
_everyone: "WeakSet[Sources]" = WeakSet()


class Sources:
    """Everything that a region's recordings were made from.

    Args:
        program: The piece of the model.
        watch: Follows the model.
        device: Where the region runs.
        reduction: What waits for gradients; None hands every gradient over to autograd.
        home: Addresses of their own for weights that were moved; None leaves them where they are.

    Attributes:
        hooks: Those of the plugin on the region's parameters.
        current: The source that was found last.
        training: The mode that the modules were in, then; see `Mode`.
        moves: How often memory was moved to where nothing is recorded.
        turn: Which sample the last look was at, inside a step, whose first look is at all; None is all.
    """

    def __init__(
        self,
        program: RegionProgram,
        watch: ModelWatch,
        device: torch.device,
        reduction: Reduction | None,
        home: Home | None = None,
    ) -> None:
        self._program, self._watch, self._reduction = program, watch, reduction
        self._device_type, self._home = device.type, home
        self._numerics = numerics_of(device.type)
        # A part's forward also reads attributes of the layer that it belongs to.
        self._above = watch.above(every_module(program.modules()))
        self.hooks = ParameterHooks()
        self._asked: deque[list[Any]] = deque(maxlen=MOST_SOURCES)
        self._numbers = count(1)
        self._adopted = self._microbatches = self.moves = 0
        self._warned: set[str] = set()
        self._looked_in = 0
        self._turns = count()
        self._deterministic = are_deterministic()
        self._types = [(module, name, p.dtype) for module, name, p in self._parameters()]
        self._found_at: tuple[object, ...] = ()
        self._generation = -1
        watch.look()
        self._look()
        if self._hook is not None:
            raise Refused(Fallback.FORWARD_HOOKS, f"{self._hook}, which a graph would not run")
        self.current = self._new(lasting=False)
        # Those that were used last are last.
        self._all = [self.current]
        _everyone.add(self)

    def __iter__(self) -> Iterator[Source]:
        return iter(self._all)

    def release(self) -> None:
        """Take hooks off the parameters and drop all recordings."""
        self.hooks.release()
        self._all = []

    def find(self, gradients: bool, idle: Callable[[], bool], asks: bool = True) -> Source | Fallback:
        """Return the source that the model is now, or why there is none.

        Args:
            gradients: Whether a backward may follow.
            idle: Whether no microbatch is between its forward and its backward, so that recordings may be dropped.
            asks: Whether a microbatch asks, for which a state that lasts gets a source.

        Raises:
            CaptureError: The model is in a state that cannot be recorded.
        """
        self._microbatches += asks
        found_at = _, numerics = self._watch.look(), self._numerics()
        if are_deterministic() != self._deterministic:
            what = f"deterministic algorithms are {'off' if self._deterministic else 'on'}"
            self._warn("deterministic", what, "until they are as at capture")
            return Fallback.NUMERICS_CHANGED
        # In a step, only the first look is at layouts and types, and each one after a write.
        step = self._watch.step_number
        looked = step > 0 and step == self._looked_in and found_at == self._found_at
        self.turn = next(self._turns) if looked else None
        if looked and self.holds(self.turn, self.current, gradients):
            return self.current
        self._looked_in, self.turn = 0, None
        found = self._compare(numerics, gradients, idle) or self._ask(numerics, asks)
        if isinstance(found, Source):
            self._use(found)
            self._found_at, self._looked_in = found_at, step if gradients else 0
        return found

    def recorded_state(self, gradients: bool) -> int:
        """Return the number of the state whose source `find` would return if no memory was moved; 0 without one.

        Args:
            gradients: Whether a backward may follow.
        """
        self._watch.look()
        self._look()
        alike = self._alike(self._numerics(), gradients)
        recorded = are_deterministic() == self._deterministic and self._hook is None
        return next((source.number for source in alike if recorded), 0)

    def _alike(self, numerics: Numerics, gradients: bool) -> Iterator[Source]:
        """Yield the sources of the state that the model is in, wherever its memory lies, the last one first."""
        for source in reversed(self._all):
            alike = source.is_of(self._state, numerics, self._generation)
            if alike and not (gradients and source.sinks.hooked_otherwise()):
                source.state = self._state  # so that the next comparison is short
                yield source

    def _compare(self, numerics: Numerics, gradients: bool, idle: Callable[[], bool]) -> Source | Fallback | None:
        """Return a source of the model's state, why it cannot be used now; None without one."""
        unchanged = self._generation == self._watch.generation
        self._look()
        if self._hook is not None:
            self._warn(Fallback.FORWARD_HOOKS, f"{self._hook}, which a graph would not run", "until it is removed")
            return Fallback.FORWARD_HOOKS
        alike = list(self._alike(numerics, gradients))
        for source in alike:
            # Outside of steps every microbatch would pay for a look at layouts: they are compared with a new state.
            if not source.moved(gradients, layouts=self._watch.step_number > 0 or not unchanged):
                return source
        if alike:
            return self._moved(alike[0], gradients, idle)
        if (what := self._retyped()) is not None:
            self._warn(Fallback.NUMERICS_CHANGED, what, "until it is as at capture")
            return Fallback.NUMERICS_CHANGED
        return None

    def _retyped(self) -> str | None:
        """Return in words a parameter of another type than at capture, for which static inputs were made."""
        for module, name, dtype in self._types:
            now = module._parameters.get(name)
            if now is not None and now.dtype != dtype:
                return f"{type(module).__name__}.{name} is of {now.dtype}, not {dtype}"
        return None

    def holds(self, turn: int | None, source: Source, gradients: bool = True) -> bool:
        """Whether memory lies where it was, and the same parameters are trained and, for a backward, hooked.

        Args:
            turn: Which sample is looked at, in a backward that of its forward; None is all.
            source: Of a recording.
            gradients: Whether a backward may follow.
        """
        hooked = gradients and source.sinks.hooked_otherwise()
        return not (hooked or source.trained_otherwise(turn) or source.moved(gradients, turn=turn))

    def _moved(self, source: Source, gradients: bool, idle: Callable[[], bool]) -> Source | Fallback:
        """Return a source for memory that lies elsewhere than that of one, or why there is none yet."""
        if gradients and source.gradients_left():
            return Fallback.GRADIENTS_LEFT
        if not idle():
            what = "memory of parameters or of their main_grad was moved inside a step"
            self._warn(Fallback.MEMORY_MOVED, what, "recaptured at the next step")
            return Fallback.MEMORY_MOVED
        if self._settled(source, gradients):
            return source
        fresh = self._new(source.lasting, source)
        self.moves += 1
        if not fresh.take_over(source):
            self._all.remove(source)
            source.recordings.clear()
        self._add(fresh)
        return fresh

    def _settled(self, source: Source, gradients: bool) -> bool:
        """Whether what was moved is back where recordings of a source read it, once its values were brought there."""
        if self._home is None or self._others_read(elsewhere := source.reads_elsewhere()):
            return False
        self._home.settle(elsewhere)
        return not source.moved(gradients, layouts=True)

    def _others_read(self, tensors: Sequence[Tensor]) -> bool:
        """Whether another region reads one of these tensors, perhaps in a backward to come."""
        wanted = set(map(id, tensors))
        others = (source for sources in _everyone if sources is not self for source in sources)
        return any(not wanted.isdisjoint(map(id, source.reads)) for source in others)

    def _use(self, source: Source) -> None:
        before = next(each for each in reversed(self._all) if each.number == source.number)
        if before is not source:
            source.follow(before)
        self._all.remove(source)
        self._all.append(source)
        self.current = source

    def _add(self, fresh: Source) -> None:
        """Keep one more source, and of the others those that were used last, at least one of each state.

        Ranks keep the same states, wherever their memory lies. Of parameters that others took the place of, only those
        used last are kept, as their memory may be much.
        """
        kept: list[Source] = []
        left: set[nn.Parameter] = set()
        for source in reversed(self._all):
            replaced = {parameter for *_, parameter in source.aliases.replaced()}
            left = left or replaced
            if replaced <= left:
                kept.append(source)
        while len(kept) >= MOST_SOURCES:
            places = Counter(source.number for source in (fresh, *kept))
            kept.remove(next((source for source in reversed(kept) if places[source.number] > 1), kept[-1]))
        self._all = [*reversed(kept), fresh]
        self.hooks.keep(frozenset(p for source in self._all for p in source.aliases.originals))

    def _look(self) -> None:
        if self._generation != self._watch.generation:
            modules = every_module(self._program.modules())
            self._generation, self._state = self._watch.generation, self._watch.state(self._modules())
            self._hook, self.training = self._watch.foreign_hook(modules), self._watch.training()

    def _modules(self) -> list[nn.Module]:
        """Return the modules whose own attributes and tensors the piece may read."""
        return [*self._above, *every_module(self._program.modules())]

    def _parameters(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        modules = every_module(self._program.modules())
        return [(m, name, p) for m in modules for name, p in m._parameters.items() if p is not None]

    def _new(self, lasting: bool = True, instead_of: Source | None = None) -> Source:
        if (name := self._watch.trained_attribute(self._modules())) is not None:
            raise CaptureError(f"{name} requires a gradient and is no parameter, so a replay would give it none")
        if (found := self._watch.exempt.own_code(every_module(self._program.modules()))) is not None:
            raise Refused(Fallback.OWN_CODE, found)
        with torch.inference_mode(False):
            return Source(
                self._program,
                self._state,
                self._numerics(),
                self._reduction,
                self.hooks,
                self._device_type,
                list(self._watch.tensors_of(self._modules())),
                next(self._numbers) if instead_of is None else instead_of.number,
                lasting,
                instead_of,
            )

    def _ask(self, numerics: Numerics, asks: bool) -> Source | Fallback:
        """Return a new source once microbatches have asked for the model's state often enough."""
        reason, what = self._reason(numerics)
        if not asks:
            return reason
        self._warn(what, what)
        trained = [parameter.requires_grad for *_, parameter in self._parameters()]
        key = (self._state, numerics, trained, self._watch.replaced, set(map(id, self.hooks.hooked())))
        asked = next((each for each in self._asked if each[0] == key), None)
        if asked is None:
            self._asked.append(asked := [key, 0])
        asked[1] += 1
        if asked[1] < LASTING << self._adopted // MANY_ADOPTED:
            return reason
        fresh = self._new()
        self._asked.remove(asked)
        self._adopted = max(0, self._adopted - self._microbatches // PAYS) + 1
        self._microbatches = 0
        self._add(fresh)
        announce(f"{self._program.name}: graphs are captured for this state of the model as well: {what}")
        return fresh

    def _reason(self, numerics: Numerics) -> tuple[Fallback, str]:
        """Return why no source describes the model, as a reason and in words."""
        alike = [source for source in self._all if source.state == self._state and not source.aliases.replaced()]
        if not alike:
            replaced = [f"{self._watch.name(m)}: {name}" for m, name, _ in self.current.aliases.replaced()]
            changes = self._state.changes_from(self.current.state) or replaced or ["other modules"]
            return Fallback.MODEL_CHANGED, f"{listed(changes)} changed"
        alike = [source for source in alike if source.numerics.autocast == numerics.autocast]
        if not alike:
            return Fallback.AUTOCAST_CHANGED, f"autocast is {numerics.autocast or 'off'}"
        alike = [source for source in alike if source.numerics == numerics]
        if not alike:
            what = f"fp32 products are computed in {numerics.products}, convolutions in {numerics.convolutions}"
            return Fallback.NUMERICS_CHANGED, what
        other = "require a gradient" if all(source.trained_otherwise() for source in alike) else "have a hook"
        return Fallback.PARAMETERS_CHANGED, f"other parameters {other}"

    def _warn(self, what: str, text: str, after: str = LASTS) -> None:
        """Say something once, and no more than a few of the changes that come and go."""
        if what not in self._warned and (after != LASTS or len(self._warned) < MOST_TOLD):
            self._warned.add(what)
            warn(f"{self._program.name}: {text}; microbatches run eager, {after}")
