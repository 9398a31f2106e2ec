"""What a model is, besides its tensors' memory: modules, their attributes, modes and hooks, and how that changes."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from .dict_watch import WATCHER

MISSING: Any = object()
TRAINING = "training"
# Dicts of a module that decide which tensors and modules its forward uses.
PARTS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
# What PyTorch notes of a module's hooks and leaves behind when they are gone.
LEFT_BY_HOOKS = frozenset(("_is_full_backward_hook",))
# Values that are the same where they are equal. Any other value is the same only where it is the same object.
PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, MethodType)
# Modules that compute nothing of their own; PEFT makes new ones of the same modules whenever it walks a model.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
COMPARED = (*PLAIN, *CONTAINERS)


@dataclass(frozen=True, slots=True)
class Exempt:
    """What may change of a model without changing what it computes.

    Attributes:
        bookkeeping: Names of attributes that a train loop writes for its own use.
        own_hook: Whether a module's hook is the model's own code, which is recorded, or does its work elsewhere.
    """

    bookkeeping: frozenset[str] = frozenset()
    own_hook: Callable[[Callable[..., Any]], bool] = lambda hook: False


NOTHING_EXEMPT = Exempt()


class Entry(NamedTuple):
    """One entry of a watched dict.

    Attributes:
        table: The dict's `id`.
        key: Its key.
    """

    table: int
    key: Hashable


class Table(NamedTuple):
    """A watched dict.

    Attributes:
        name: Of its owner and itself, for messages.
        values: The dict.
        hooks: Whether it holds hooks.
        submodules: Whether it holds a module's submodules.
        plain_only: Whether only changes of plain values count: a config's, which holds callables of the train loop.
    """

    name: str
    values: dict[Any, Any]
    hooks: bool = False
    submodules: bool = False
    plain_only: bool = False


class _Seen(NamedTuple):
    """What a look found."""

    generation: int
    differences: "Differences"
    training: bool | tuple[bool, ...]
    foreign_hook: str | None


# What differs from how the model was when the watch began.
Differences = Mapping[Entry, Any]


class ModelWatch:
    """Follows one model from the moment that the object is made, until `close`.

    What the model's own forward leaves behind in attributes is its result and no difference: passes run inside
    `passing`. A value that comes back is no difference either.

    Args:
        roots: Modules that are followed with all below them.
        replaced: Attributes that the plugin replaces on a module, as (module, name).
        called: Modules whose own hooks run around a replay as well, because they are called in the usual way.
        exempt: What is no difference.

    Attributes:
        generation: Grows whenever something may have changed.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        replaced: Iterable[tuple[nn.Module, str]] = (),
        called: Sequence[nn.Module] = (),
        exempt: Exempt = NOTHING_EXEMPT,
    ) -> None:
        self.generation = 0
        self._roots, self._called, self._own_hook = tuple(roots), tuple(called), exempt.own_hook
        self._ignored = LEFT_BY_HOOKS | exempt.bookkeeping
        self._replaced = {Entry(id(vars(module)), name) for module, name in replaced}
        self._tables: dict[int, Table] = {}
        self._before: dict[Entry, Any] = {}
        self._volatile: set[Entry] = set()
        self._passing = 0
        self._touched: dict[Entry, Any] = {}
        self._seen: _Seen | None = None
        self._tree: dict[nn.Module, str] = {}
        self._tree_changed = True
        self._look()

    def _follow(self) -> None:
        """Follow the modules that the model consists of now; those that were replaced are followed on."""
        self._tree_changed = False
        self._tree = {}
        for root in self._roots:
            for name, module in root.named_modules():
                self._tree.setdefault(module, name or type(module).__name__)
        for module, name in self._tree.items():
            for table in _tables_of(module, name):
                self._add(table)
        for hooks in GLOBAL_HOOKS:
            self._add(Table(f"torch.nn.modules.module.{hooks}", getattr(torch_module, hooks), hooks=True))

    def close(self) -> None:
        """Follow nothing any more."""
        for table in self._tables.values():
            WATCHER.unwatch(table.values, self._note)
        self._tables, self._before, self._tree = {}, {}, {}

    def _add(self, table: Table) -> None:
        if id(table.values) not in self._tables:
            self._tables[id(table.values)] = table
            WATCHER.watch(table.values, self._note)

    @contextmanager
    def passing(self, training: bool | None = None) -> Iterator[None]:
        """Run a pass of the model itself inside; what it changes for good is a result of passes from now on.

        Args:
            training: Mode of all modules inside; None leaves each in its own.
        """
        self._passing += 1
        try:
            with _training_mode(self._tree, training):
                yield
        finally:
            self._passing -= 1
            if not self._passing:
                touched, self._touched = self._touched, {}
                self._volatile.update(p for p, old in touched.items() if not same(old, self._value(p)))

    def _note(self, values: dict[Any, Any], key: Hashable) -> None:
        place = Entry(id(values), key)
        if self._passing:
            self._touched.setdefault(place, values.get(key, MISSING))
        elif not (key in self._ignored or place in self._volatile or place in self._replaced):
            self.generation += 1
            self._tree_changed |= self._tables[place.table].submodules
            self._before.setdefault(place, values.get(key, MISSING))

    def _value(self, place: Entry) -> Any:
        return self._tables[place.table].values.get(place.key, MISSING)

    def _look(self) -> "_Seen":
        if self._seen is None or self._seen.generation != self.generation:
            if self._tree_changed:
                self._follow()
            differences = {}
            for place, old in list(self._before.items()):
                now = self._value(place)
                if same(old, now):
                    del self._before[place]
                elif self._counts(place, old, now):
                    differences[place] = now
            self._seen = _Seen(self.generation, differences, self._modes(), self._find_foreign_hook())
        return self._seen

    def _counts(self, place: Entry, old: Any, now: Any) -> bool:
        table = self._tables[place.table]
        if table.hooks or place.key == TRAINING:
            return False
        return not table.plain_only or all(v is None or isinstance(v, PLAIN[:-1]) for v in (old, now))

    def _modes(self) -> bool | tuple[bool, ...]:
        modes = tuple(module.training for module in self._tree if type(module) not in CONTAINERS)
        return modes[0] if len(set(modes)) == 1 else modes

    def _find_foreign_hook(self) -> str | None:
        bypassed = [(name, m) for m, name in self._tree.items() if m not in self._called]
        hooked = [(name, getattr(m, hooks)) for name, m in bypassed for hooks in HOOKS]
        hooked += [("every module", getattr(torch_module, hooks)) for hooks in GLOBAL_HOOKS]
        for name, hooks in hooked:
            for hook in hooks.values():
                if not self._own_hook(hook):
                    return f"{name} has the hook {getattr(hook, '__qualname__', type(hook).__qualname__)}"
        return None

    @property
    def training(self) -> bool | tuple[bool, ...]:
        """The mode of all modules, or that of each where they differ."""
        return self._look().training

    @property
    def foreign_hook(self) -> str | None:
        """A hook that a replay would not run, in words; None where there is none."""
        return self._look().foreign_hook

    def differences(self) -> Differences:
        """Return what differs now from when the watch began, besides modes and hooks."""
        return self._look().differences

    def holders(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Return the followed modules that have one of these below them."""
        held = set(modules)
        return [module for module in self._tree if module not in held and not held.isdisjoint(module.modules())]

    def tensors_of(self, modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
        """Return the tensors that modules hold besides parameters and what a pass leaves behind."""
        for module in modules:
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)
            for name, value in vars(module).items():
                held = isinstance(value, torch.Tensor) and not value.requires_grad
                if held and name not in self._ignored and Entry(id(vars(module)), name) not in self._volatile:
                    yield value

    def tables_of(self, modules: Iterable[nn.Module]) -> frozenset[int]:
        """Return the dicts of modules, without those below them, as `Entry.table` names them."""
        return frozenset(id(table.values) for module in modules for table in _tables_of(module, ""))

    def described(self, places: Iterable[Entry]) -> str:
        """Return in words what changed at some places."""
        said = []
        for place in places:
            table = self._tables[place.table]
            old, now = self._before.get(place, MISSING), self._value(place)
            said.append(f"{table.name}: {place.key} {_word(old)} -> {_word(now)}")
        return "; ".join(said[:3]) + (f" and {len(said) - 3} more" if len(said) > 3 else "")


def _tables_of(module: nn.Module, name: str) -> Iterator[Table]:
    """Return what is followed of one module."""
    yield Table(name, vars(module))
    for part in PARTS:
        yield Table(name, getattr(module, part), submodules=part == "_modules")
    for hooks in HOOKS:
        yield Table(f"{name}.{hooks}", getattr(module, hooks), hooks=True)
    config = vars(module).get("config")
    if config is not None and hasattr(config, "__dict__"):
        yield Table(f"{name}.config", vars(config), plain_only=True)


@contextmanager
def _training_mode(modules: Iterable[nn.Module], training: bool | None) -> Iterator[None]:
    """Put modules into training or evaluation mode; every module's own mode comes back."""
    if training is None:
        yield
        return
    switched = [m for m in modules if m.training != training]
    for module in switched:
        module.training = training
    try:
        yield
    finally:
        for module in switched:
            module.training = not training


def same(old: Any, now: Any) -> bool:
    """Whether two values of an attribute are the same, without comparing tensors or other objects by value."""
    if old is now:
        return True
    return type(old) is type(now) and isinstance(old, COMPARED) and token(old) == token(now)


def token(value: Any) -> Hashable:
    """Return what stands for a value in a state: itself where it is plain, its identity otherwise."""
    if isinstance(value, PLAIN):
        return type(value), value
    if type(value) in CONTAINERS:
        return type(value), tuple((name, id(module)) for name, module in value._modules.items())
    return id(value)


def _word(value: Any) -> str:
    if value is MISSING:
        return "absent"
    return repr(value) if value is None or isinstance(value, PLAIN[:-1]) else type(value).__name__
