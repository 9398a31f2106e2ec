"""Which of a region's sources the model is now: what a replay must find unchanged, and what follows where it is not."""

from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ...announce import announce, warn
from ..errors import CaptureError, Refused
from ..fallback import Fallback
from ..instance import every_module
from ..memory.returning_tensors import ReturningTensors
from ..program import RegionProgram
from ..replays.gradients import ParameterHooks, Reduction
from .identity import Identity
from .model_watch import Differences, ModelWatch
from .source import Numerics, Source, State, autocast_dtype, precision_getters
from .values import token

# Microbatches of one state after which it gets recordings of its own: it lasts, or comes back.
LASTING = 2
# States whose recordings are kept. After each `MANY_ADOPTED` new ones a state must last twice as long, unless there
# were `PAYS` microbatches to each: so a model that changes all the time costs few captures, and none once it does not.
MOST_SOURCES, MANY_ADOPTED, PAYS = 4, 16, 256
# States that were asked for and are remembered: a model may never be in one of them again.
MOST_ASKED = 64
# Changes that are told.
MOST_TOLD = 16
LASTS = "graphs of its own are captured if this lasts"
are_deterministic = torch._C._get_deterministic_algorithms


# Those of all regions of this process.
_everyone: "WeakSet[Sources]" = WeakSet()


def _parameters_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module._parameters.items() if parameter is not None)


class _State(NamedTuple):
    """What a look at the piece's modules found.

    Attributes:
        generation: Of the watch.
        state: What stands for the differences from when the watch began.
        own: These differences.
        foreign_hook: A hook that a replay would not run, in words.
        training: The mode of the modules.
    """

    generation: int
    state: State
    own: Differences
    foreign_hook: str | None
    training: bool | tuple[bool, ...]


class _Asked(NamedTuple):
    """How often a state was asked for, and what it consists of: what takes the identity of one that is gone is another.

    Where memory is reused, ranks differ, which must record together.
    """

    times: int
    values: tuple[Identity, ...]

    def again(self, own: Differences) -> "_Asked":
        """Return what is known after the state was asked for once more, with these values."""
        times = 0 if any(value.is_gone() for value in self.values) else self.times
        known_by_identity = (v for v in own.values() if isinstance(v, (Tensor, nn.Module)) and token(v) == id(v))
        return _Asked(times + 1, tuple(map(Identity, known_by_identity)))


NEVER = _Asked(0, ())


class Sources:
    """Everything that a region's recordings were made from.

    Args:
        program: The piece of the model.
        watch: Follows the model.
        device: Where the region runs.
        reduction: What waits for gradients; None hands every gradient over to autograd.
        returning: Gives tensors that were moved addresses of their own; None leaves them where they are.

    Attributes:
        current: The source that was found last.
        moves: How often memory was moved to where nothing is recorded.
    """

    def __init__(
        self,
        program: RegionProgram,
        watch: ModelWatch,
        device: torch.device,
        reduction: Reduction | None,
        returning: ReturningTensors | None = None,
    ) -> None:
        self._program, self._watch, self._reduction = program, watch, reduction
        self._device_type, self._returning = device.type, returning
        self._products, self._convolutions = precision_getters(device.type)
        # A part's forward also reads attributes of the layer that it belongs to.
        self._holders = watch.holders(every_module(program.modules()))
        self._hooks = ParameterHooks()
        self._asked: dict[Hashable, _Asked] = {}
        self._adopted = self._microbatches = self.moves = 0
        # Parameters of dropped sources that others took the place of, and whether one of them was met again.
        self._left: list[Identity] = []
        self._come_back = False
        self._warned: set[str] = set()
        self._looks_once = self._looked = False
        self._deterministic = are_deterministic()
        self._types = [(m, name, p.dtype) for m in every_module(program.modules()) for name, p in _parameters_of(m)]
        self._found_at: tuple[object, ...] = ()
        self._seen: _State | None = None
        watch.look()
        if (hook := self._look().foreign_hook) is not None:
            raise Refused(Fallback.FORWARD_HOOKS, f"{hook}, which a graph would not run")
        self.current = self._new(lasting=False)
        self._all = [self.current]
        _everyone.add(self)

    def __iter__(self) -> Iterator[Source]:
        for source in self._all:
            yield source
            if source.earlier is not None:
                yield source.earlier

    def release(self) -> None:
        """Take hooks off the parameters and drop all recordings."""
        self._hooks.release()
        self._all = []
        if self._returning is not None:
            self._returning.stop()

    def clear(self) -> None:
        """Take back the flags that replays set on parameters."""
        self._hooks.clear()

    def adds_later(self, parameters: Set[nn.Parameter]) -> bool:
        """Whether the backward under way will yet replay what adds to the gradient of one of these parameters."""
        return self._hooks.pending.adds_later(parameters)

    @property
    def training(self) -> bool | tuple[bool, ...]:
        """The mode that the modules are in; see `Mode`."""
        return self._look().training if self._seen is None else self._seen.training

    @contextmanager
    def memory_kept(self) -> Iterator[None]:
        """Inside, as in a training step, memory stays where the first look finds it: only that one looks.

        Later ones look at some of the parameters, spread over the model, for whether they are trained.
        """
        self._looks_once = True
        try:
            yield
        finally:
            self._looks_once = self._looked = False

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
        generation = self._watch.look(contents=not self._looked)
        settings = self._settings()
        if are_deterministic() != self._deterministic:
            what = f"deterministic algorithms are {'off' if self._deterministic else 'on'}"
            self._warn("deterministic", what, "until they are as at capture")
            return Fallback.NUMERICS_CHANGED
        if self._found_at == (generation, settings):
            found = self._as_recorded(self.current, gradients, idle)
            if found is not None:
                return found
        return self._look_around(Numerics.of(*settings), gradients, idle, asks)

    def known(self) -> Source | None:
        """Return a source of the state that the model is in, None without one; asks for none and looks at no memory."""
        return next((source for _, source in self._known()), None)

    def recorded_state(self, gradients: bool) -> int:
        """Return the number of a source that `find` would return if no memory was moved, from 1; 0 without one.

        Args:
            gradients: Whether a backward may follow.
        """
        for number, source in self._known():
            hooked = gradients and source.sinks.hooked_otherwise()
            if not hooked and (self._looked or not source.trained_otherwise()):
                return number
        return 0

    def _known(self) -> Iterator[tuple[int, Source]]:
        """Yield the sources of the state that the model is in, with their numbers from 1; see `known`."""
        numerics = self._numerics()
        self._watch.look()
        if are_deterministic() != self._deterministic:
            return
        look = self._look()
        if look.foreign_hook is not None:
            return
        for number, source in enumerate(self._all, 1):
            if (source.state, source.numerics) == (look.state, numerics) and not source.retyped():
                yield number, source

    def _look_around(
        self, numerics: Numerics, gradients: bool, idle: Callable[[], bool], asks: bool
    ) -> Source | Fallback:
        """Return what `find` does, without what it found last."""
        hook, state = self._look().foreign_hook, self._look().state
        if hook is not None:
            self._warn(Fallback.FORWARD_HOOKS, f"{hook}, which a graph would not run", "until it is removed")
            return Fallback.FORWARD_HOOKS
        for source in self._all:
            if source.state == state and source.numerics == numerics:
                found = self._as_recorded(source, gradients, idle)
                if found is not None:
                    return found
        if (what := self._retyped()) is not None:
            self._warn(Fallback.NUMERICS_CHANGED, what, "until it is as at capture")
            return Fallback.NUMERICS_CHANGED
        return self._ask(state, numerics) if asks else self._reason(state, numerics)[0]

    def _retyped(self) -> str | None:
        """Return in words a parameter of another type than at capture, for which static inputs were made."""
        for module, name, dtype in self._types:
            now = module._parameters.get(name)
            if now is not None and now.dtype != dtype:
                return f"{type(module).__name__}.{name} is of {now.dtype}, not {dtype}"
        return None

    def holds(self, source: Source) -> bool:
        """Whether a backward may be replayed: memory lies where it was, the same parameters are trained and hooked.

        Inside a step, some of the parameters and of their `main_grad` are looked at, spread over the model.
        """
        if source.sinks.hooked_otherwise():
            return False
        if self._looked:
            return not source.sample_differs()
        return not (source.trained_otherwise() or source.moved(gradients=True))

    def _as_recorded(self, source: Source, gradients: bool, idle: Callable[[], bool]) -> Source | Fallback | None:
        """Return a source of the model's state, why it cannot be used now, None if something else changed."""
        if gradients and source.sinks.hooked_otherwise():
            return None
        if self._looked and source is self.current and not source.sample_trained_otherwise():
            return source
        if source.trained_otherwise() or source.retyped():
            self._looked = False
            return None
        if source.moved(gradients, layouts=self._looks_once):
            if gradients and source.gradients_left():
                return Fallback.GRADIENTS_LEFT
            if not idle():
                what = "memory of parameters or of their main_grad was moved inside a step"
                self._warn(Fallback.MEMORY_MOVED, what, "recaptured at the next step")
                return Fallback.MEMORY_MOVED
            if not self._settled(source, gradients):
                source = self._instead_of(source)
        self._looked = self._looks_once and gradients
        self._choose(source)
        return source

    def _settled(self, source: Source, gradients: bool) -> bool:
        """Whether what was moved is back where recordings of a source read it, once its values were brought there."""
        if self._returning is None or self._others_read(elsewhere := source.reads_elsewhere()):
            return False
        self._returning.settle(elsewhere)
        if source.moved(gradients, layouts=self._looks_once):
            return False
        source.forget_elsewhere()
        return True

    def _others_read(self, tensors: Sequence[Tensor]) -> bool:
        """Whether another region reads one of these tensors, perhaps in a backward to come."""
        wanted = set(map(id, tensors))
        others = (source for sources in _everyone if sources is not self for source in sources)
        return any(not wanted.isdisjoint(map(id, source.reads)) for source in others)

    def release_unused(self) -> int:
        """Take memory at addresses that no tensor has now off the device; returns how many bytes left.

        Raises:
            DeviceMemoryError: The driver failed.
        """
        return 0 if self._returning is None else self._returning.release()

    def _choose(self, source: Source) -> None:
        self.current = source
        self._found_at = self._watch.look(contents=False), self._settings()

    def _instead_of(self, stale: Source) -> Source:
        """Return the source before one whose memory was moved, if all lies there again, else one without recordings."""
        fresh, earlier = self._new(stale.lasting, stale), stale.earlier
        if earlier is not None and earlier.lies_as(fresh):
            earlier.recorded_by_other_ranks, earlier.warm = fresh.recorded_by_other_ranks, fresh.warm
            fresh = earlier
        else:
            self.moves += 1
        fresh.take_place_of(stale)
        self._replace_all([fresh if source is stale else source for source in self._all])
        return fresh

    def _replace_all(self, sources: list[Source]) -> None:
        self._all = sources
        self._hooks.keep(frozenset(p for source in sources for p in source.aliases.originals))

    def _settings(self) -> tuple[Any, ...]:
        """Return settings by which kernels are chosen, as PyTorch has them."""
        return autocast_dtype(self._device_type), self._products(), self._convolutions()

    def _numerics(self) -> Numerics:
        return Numerics.of(*self._settings())

    def _look(self) -> "_State":
        generation = self._watch.look(contents=False)
        if self._seen is None or self._seen.generation != generation:
            differences = self._watch.differences()
            tables = self._watch.tables_of(self._modules()) if differences else ()
            own = {entry: value for entry, value in differences.items() if entry.table in tables}
            state = frozenset(self._watch.tokens(own).items())
            hook = self._watch.foreign_hook(every_module(self._program.modules()))
            self._seen = _State(generation, state, own, hook, self._watch.training)
        return self._seen

    def _modules(self) -> list[nn.Module]:
        """Return the modules whose own attributes and tensors the piece may read."""
        return [*self._holders, *every_module(self._program.modules())]

    def _new(self, lasting: bool = True, instead_of: Source | None = None) -> Source:
        seen = self._look()
        if (name := self._watch.trained_attribute(self._modules())) is not None:
            raise CaptureError(f"{name} requires a gradient and is no parameter, so a replay would give it none")
        if (found := self._watch.own_code(every_module(self._program.modules()))) is not None:
            raise Refused(Fallback.OWN_CODE, found)
        with torch.inference_mode(False):
            return Source(
                self._program,
                seen.state,
                self._numerics(),
                self._reduction,
                self._hooks,
                self._device_type,
                list(self._watch.tensors_of(self._modules())),
                (*seen.own.values(), *self._watch.followed()),
                lasting,
                instead_of,
            )

    def _ask(self, state: State, numerics: Numerics) -> Source | Fallback:
        """Return recordings' new source once the model has been asked for in this state often enough."""
        reason, what = self._reason(state, numerics)
        key = (state, numerics, self._trained(), frozenset(map(id, self._hooks.foreign())))
        if len(self._asked) == MOST_ASKED and key not in self._asked:
            self._asked.clear()
        self._asked[key] = self._asked.get(key, NEVER).again(self._look().own)
        self._warn(what, what)
        if self._asked[key].times < LASTING << self._adopted // MANY_ADOPTED:
            return reason
        fresh = self._new()
        del self._asked[key]
        self._adopted = max(0, self._adopted - self._microbatches // PAYS) + 1
        self._microbatches = 0
        self._replace_all([*self._kept()[-MOST_SOURCES + 1 :], fresh])
        self._choose(fresh)
        announce(f"{self._program.name}: graphs are captured for this state of the model as well: {what}")
        return fresh

    def _kept(self) -> list[Source]:
        """Return the sources that stay when one is added.

        Of parameters that others took the place of, only those used last are kept, as their memory may be much, unless
        some that were dropped came back.
        """
        present = {
            id(parameter) for module in every_module(self._program.modules()) for _, parameter in _parameters_of(module)
        }
        left = [each for each in self._left if not each.is_gone()]
        self._come_back = self._come_back or any(each.number in present for each in left)
        if self._come_back:
            return self._all
        replaced = {source: source.aliases.replaced() for source in self._all if source is not self.current}
        self._left = [*left, *(Identity(parameter) for parameters in replaced.values() for parameter in parameters)]
        return [source for source in self._all if not replaced.get(source)]

    def _trained(self) -> tuple[bool, ...]:
        modules = every_module(self._program.modules())
        return tuple(parameter.requires_grad for module in modules for _, parameter in _parameters_of(module))

    def _reason(self, state: State, numerics: Numerics) -> tuple[Fallback, str]:
        """Return why no source describes the model, as a reason and in words."""
        alike = [source for source in self._all if source.state == state]
        if not alike:
            changes = self._watch.described(self._look().own)
            return Fallback.MODEL_CHANGED, changes or "the model is as when its watch began"
        alike = [source for source in alike if source.numerics.autocast == numerics.autocast]
        if not alike:
            return Fallback.AUTOCAST_CHANGED, f"autocast is {numerics.autocast or 'off'}"
        alike = [source for source in alike if source.numerics == numerics]
        if not alike:
            _, products, convolutions = numerics
            return (
                Fallback.NUMERICS_CHANGED,
                f"fp32 products are computed in {products}, convolutions in {convolutions}",
            )
        if all(source.trained_otherwise() for source in alike):
            return Fallback.PARAMETERS_CHANGED, "other parameters require a gradient"
        return Fallback.PARAMETER_HOOKS, "other parameters have a hook"

    def _warn(self, what: str, text: str, after: str = LASTS) -> None:
        """Say something once, and no more than a few of the changes that come and go."""
        if what not in self._warned and (after != LASTS or len(self._warned) < MOST_TOLD):
            self._warned.add(what)
            warn(f"{self._program.name}: {text}; microbatches run eager, {after}")
