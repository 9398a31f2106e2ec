"""Passes before a capture: one that is looked at, and passes over one layer of each kind.

No replay leaves a tensor somewhere or draws on the host, as the pass may do that is looked at. It is one behind the
first, which fills caches, over one layer of each kind. Not seen are tensors that compiled code without operations makes
and no attribute holds, and generators that C code calls, as in `map(rng.random, ...)`. A value of the device that is
read on the host fails the capture itself.
"""

import gc
import pickle
import random
import sys
import tempfile
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from itertools import compress
from threading import get_ident
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ...announce import LOGGER
from ..changes.dict_watch import WATCHER
from ..changes.model_watch import ModelWatch
from ..changes.state import PARTS, plain, tensors_in
from ..errors import Refused, named
from ..fallback import Fallback
from ..instance import InstanceMethod, own_attribute

# Objects between a tensor and a module or a global, at most.
DEPTH = 8
# Packages whose own objects keep tensors of a pass for its backward and for replays.
OWN = frozenset(("torch", __name__.partition(".")[0]))
# What keeps an object only for the time of a call.
PASSING = (types.FrameType, types.TracebackType, types.GeneratorType, types.CoroutineType)


def tensors_of_storages(storages: Set[int]) -> list[Tensor]:
    """Return the tensors of this process, as Python has them, whose memory is one of some storages."""
    objects = gc.get_objects()  # a million and more: no line of Python for each
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    tensors = compress(objects, map(kinds.__contains__, map(type, objects)))
    return [each for each in tensors if _storage(each) in storages]


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def holder_of(tensors: Sequence[Tensor], watch: ModelWatch) -> str | None:
    """Return in words what keeps one of some tensors for good: a module's attribute, or a global; None without one.

    Args:
        tensors: The tensors.
        watch: Follows the model; names its modules and what may keep tensors.
    """
    names = {id(tensor): "" for tensor in tensors}
    values: list[Any] = list(tensors)
    seen, own = {id(tensors), *names}, OWN | watch.exempt.packages
    for _ in range(DEPTH):
        if not values:  # each look for referrers takes a tenth of a second, also for those of nothing
            break
        seen.add(id(values))
        holders = gc.get_referrers(*values)
        seen.add(id(holders))
        values, held_by, names = [], names, {}
        for holder in holders:
            if id(holder) in seen or isinstance(holder, PASSING):
                continue
            seen.add(id(holder))
            name = next((_joined(key, held_by[id(value)]) for key, value in _held(holder) if id(value) in held_by), "")
            root = _root(holder, watch)
            package = (root or type(holder).__module__).partition(".")[0]  # of its class, or of a global
            if name in watch.ignored if isinstance(holder, nn.Module) else package in own:
                continue
            if root is not None:
                return f"{root}.{name}"
            values.append(holder)
            names[id(holder)] = name
    return None


def _root(holder: Any, watch: ModelWatch) -> str | None:
    """Return the name of a module of the model or of Python; None for another object."""
    if isinstance(holder, nn.Module):
        return watch.name(holder)
    return str(holder.get("__name__")) if isinstance(holder, dict) and "__builtins__" in holder else None


def _held(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, with its attribute's name or its key, if it has one."""
    named = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    yield from ((str(key), value) for key, value in named.items())
    yield from (("", value) for value in gc.get_referents(holder))


def _joined(key: str, name: str) -> str:
    return name if key in PARTS else ".".join(filter(None, (key, name)))


def copies_of(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return tensors that passes may count in, each with a copy: warm-up is no training.

    Args:
        tensors: Buffers, and what attributes hold. Weights and what is quantized of them are not updated by passes.
    """
    written = (each for each in tensors if type(each) is Tensor and not each.is_inference())
    return [(each, each.clone()) for each in written if torch._debug_has_internal_overlap(each) != 1]


@contextmanager
def tensors_put_back(held: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Put back afterwards what changes inside; a table that only earlier passes filled stays filled."""
    versions = [tensor._version for tensor, _ in held]
    try:
        yield
    finally:
        with torch.no_grad():
            for (tensor, values), version in zip(held, versions, strict=True):
                if tensor._version != version:
                    tensor.copy_(values)


# Tool numbers of `sys.monitoring` that no kind of tool has for itself.
FREE_TOOLS = (3, 4)


class Operations(TorchDispatchMode):
    """The operations of a pass on this thread.

    Args:
        generators: What work that is recorded may draw random numbers from.
        place: Returns in words where in the model a frame runs.

    Attributes:
        draws: What drew on the host, in words.
    """

    def __init__(self, generators: Sequence[torch.Generator], place: Callable[[FrameType | None], str]) -> None:
        super().__init__()
        self._generators, self._place = generators, place
        self._made: dict[int, StorageWeakRef] = {}
        self.draws: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and note what it makes and draws."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        results = list(tensors_in(made))
        with suppress(NotImplementedError, RuntimeError):  # tensors without a storage
            given = {each.untyped_storage()._cdata for each in tensors_in((args, kwargs))}
            for storage in (each.untyped_storage() for each in results):
                if storage._cdata not in given:
                    self._made[storage._cdata] = StorageWeakRef(storage)
        if torch.Tag.nondeterministic_seeded in func.tags and self._is_of_host(kwargs.get("generator"), results):
            self.draws.append(f"{self._place(sys._getframe(1))} calls {func}")
        return made

    def _is_of_host(self, generator: torch.Generator | None, results: Sequence[Tensor]) -> bool:
        """Whether an operation that draws does so on the host, from what no recording draws from."""
        if any(result.device.type != "cpu" for result in results):
            return False
        return (torch.default_generator if generator is None else generator) not in self._generators

    def left(self) -> Set[int]:
        """Return the storages that were made and are still there."""
        return {number for number, storage in self._made.items() if not storage.expired()}


class HostGenerators:
    """Generators of Python and NumPy from which calls on this thread draw inside.

    Args:
        place: Returns in words where in the model a frame runs.
    """

    def __init__(self, place: Callable[[FrameType | None], str]) -> None:
        self._place, self._thread = place, get_ident()
        numpy = sys.modules.get("numpy")
        others = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
        self._kinds: tuple[type, ...] = (random.Random, *others)
        self._called: dict[int, tuple[Any, object, str]] = {}
        # Names of temporary files, which compilers write, are random, too.
        self._of_files: list[Any] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at calls inside; without effect where other tools use up all numbers."""
        monitoring = sys.monitoring
        tool = next((number for number in FREE_TOOLS if monitoring.get_tool(number) is None), None)
        if tool is None:
            yield
            return
        monitoring.use_tool_id(tool, __name__)
        try:
            monitoring.register_callback(tool, monitoring.events.CALL, self._note)
            monitoring.set_events(tool, monitoring.events.CALL)
            yield
        finally:
            monitoring.set_events(tool, 0)
            monitoring.register_callback(tool, monitoring.events.CALL, None)  # a freed number keeps its callback
            monitoring.free_tool_id(tool)

    def _note(self, code: CodeType, offset: int, function: object, first: object) -> None:
        if get_ident() != self._thread:
            return
        bound = isinstance(function, (BuiltinMethodType, MethodType))
        generator = function.__self__ if bound else first  # type: ignore[attr-defined]
        if not isinstance(generator, self._kinds) or any(generator is each for each in self._of_files):
            return
        if code.co_filename == tempfile.__file__:
            self._of_files.append(generator)
        elif id(generator) not in self._called:
            self._called[id(generator)] = generator, _state(generator), self._place(sys._getframe(1))

    def draws(self) -> list[str]:
        """Return in words where a generator was drawn from."""
        called = self._called.values()
        return [f"{place} draws from {type(each).__name__}" for each, before, place in called if _state(each) != before]


def _state(generator: Any) -> object:
    """Return what a draw changes of a generator; of one without a state something that equals nothing."""
    try:
        return generator.getstate() if isinstance(generator, random.Random) else pickle.dumps(generator)
    except NotImplementedError:
        return object()


@contextmanager
def watched_pass(watch: ModelWatch, generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Look at a pass inside, at whose end all that it computed is let go of.

    What is raised inside, as by an operation that takes no mode, tells nothing about a capture: it is logged.

    Args:
        watch: Follows the model.
        generators: What work that is recorded may draw random numbers from.

    Raises:
        Refused: A tensor outlives the pass, or it draws on the host.
    """
    operations, others = Operations(generators, watch.place), HostGenerators(watch.place)
    try:
        with others.watching(), operations:
            yield
    except Exception as error:
        LOGGER.info("a pass cannot be looked at: %s", named(error))
        return
    if draws := operations.draws + others.draws():
        raise Refused(Fallback.DRAWS_ON_HOST, draws[0])
    if not (left := operations.left()):
        return
    gc.unfreeze()  # Python finds no referrers among frozen objects; to freeze again would keep all that is there now
    where = holder_of(tensors_of_storages(left), watch)
    if where is not None:
        raise Refused(Fallback.LEAVES_TENSORS, f"each forward leaves a tensor in {where}")


# What counts or names layers; those of one kind differ in it.
NUMBERS = frozenset(("layer_number", "layer_idx", "layer_no", "name"))


class _Pass:
    """Runs layers' forwards, one of each kind.

    Args:
        kinds: Of layers that passes of the model in the same state looked at; those of others come to it.
    """

    def __init__(self, kinds: dict[nn.Module, Hashable]) -> None:
        # Of each kind: the layer that computed, what it returned behind the hidden states, all None (None: it returned
        # these alone), and its other arguments, kept so that no other object takes their identity.
        self._ran: dict[Hashable, tuple[nn.Module, tuple[None, ...] | None, tuple[object, ...]]] = {}
        self._kinds = kinds
        # Of configurations, which have hundreds of settings each and are shared by modules.
        self._settings: dict[int, tuple[object, Hashable]] = {}

    def call(self, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer's forward, or return its hidden states where a layer of its kind ran."""
        hidden, *others = (*args, *kwargs.values()) or (None,)
        if not isinstance(hidden, Tensor):
            return forward(*args, **kwargs)
        differentiable = hidden.requires_grad and torch.is_grad_enabled()
        key = self._kinds[layer], hidden.shape, hidden.dtype, differentiable, tuple(map(id, others))
        ran, behind, _ = self._ran.get(key, (layer, None, ()))
        if ran is not layer:
            return hidden if behind is None else (hidden, *behind)
        returned = forward(*args, **kwargs)
        made, *rest = returned if isinstance(returned, tuple) and returned else (returned,)
        passes_on = isinstance(made, Tensor) and (made.shape, made.dtype) == (hidden.shape, hidden.dtype)
        if passes_on and all(value is None for value in rest):
            nones = (None,) * len(rest) if isinstance(returned, tuple) else None
            self._ran[key] = layer, nones, tuple(others)
        return returned

    def look_at(self, layer: nn.Module) -> None:
        """Note a layer's kind, before anything of the pass stands in for functions of its own."""
        if layer not in self._kinds:
            self._kinds[layer] = tuple(self._traits(name, module) for name, module in layer.named_modules())

    def _traits(self, name: str, module: nn.Module) -> Hashable:
        """Return what decides a module's kernels: class, settings, functions of its own, tensors' sizes."""
        held = (*module._parameters.values(), *module._buffers.values())
        tensors = tuple((t.shape, t.dtype, t.requires_grad) for t in held if t is not None)
        config = self._configured(getattr(module, "config", None))
        return name, type(module), _settings(module), _functions(module), config, tensors

    def _configured(self, config: object) -> Hashable:
        if id(config) not in self._settings:
            self._settings[id(config)] = config, _settings(config)  # it is kept: no other takes its identity
        return self._settings[id(config)][1]


@contextmanager
def one_layer_of_each_kind(roots: Sequence[nn.Module], kinds: dict[nn.Module, Hashable]) -> Iterator[None]:
    """Let the first of layers that are alike compute; the others return the hidden states that they are called with.

    Layers are alike where their modules, the sizes of their parameters, their settings and the arguments besides the
    hidden states are, and where what the first one returns could be another's hidden states.

    Args:
        roots: Modules; what their outermost lists of modules hold are the layers.
        kinds: Of layers, kept for other passes of the model in the same state and mode.
    """
    once = _Pass(kinds)
    layers = dict.fromkeys(layer for root in roots for layer in _layers(root))
    for layer in layers:
        once.look_at(layer)
    methods: list[InstanceMethod] = []
    try:
        with WATCHER.silent():
            methods += (InstanceMethod(layer, "forward", partial(once.call, layer, layer.forward)) for layer in layers)
        yield
    finally:
        with WATCHER.silent():
            for method in reversed(methods):
                method.restore()


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield what the outermost lists of modules hold."""
    if isinstance(module, nn.ModuleList):
        yield from module.children()  # a list may also hold None
        return
    for child in module.children():
        yield from _layers(child)


def _settings(holder: object) -> Hashable:
    plain = getattr(holder, "__dict__", {}).items()
    return tuple((name, v) for name, v in plain if _is_setting(v) and name not in NUMBERS)


def _functions(module: nn.Module) -> Hashable:
    """Return what a module calls that its attributes hold: that of one layer may differ from all others."""
    names = [name for name, v in vars(module).items() if callable(v) and not isinstance(v, (type, nn.Module))]
    return tuple((name, _function(own_attribute(module, name), module)) for name in names)


def _function(called: Any, module: nn.Module) -> Hashable:
    """Return what a function is besides the module that it is bound to; modules keep all that is named by identity.

    Functions that a constructor makes for each module are alike if they close over the same.
    """
    if isinstance(called, MethodType):
        return id(called.__func__), None if called.__self__ is module else id(called.__self__)
    if isinstance(called, partial):
        return _function(called.func, module), *map(id, (*called.args, *called.keywords.values()))
    if not isinstance(called, FunctionType):
        return id(called)
    try:
        inside = [cell.cell_contents for cell in called.__closure__ or ()]
    except ValueError:  # a name that is not bound yet
        return id(called)
    held = (*inside, *(called.__defaults__ or ()), *(called.__kwdefaults__ or {}).values())
    return id(called.__code__), *(value if plain(value) else id(value) for value in held)


def _is_setting(value: object) -> bool:
    """Whether a kernel may be chosen by a value. Other objects belong to one layer each."""
    return plain(value) or (type(value) is tuple and all(map(_is_setting, value)))
