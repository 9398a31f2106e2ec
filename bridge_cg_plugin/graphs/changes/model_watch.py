"""What a model is, besides its tensors' memory: modules, their attributes, modes and hooks, and how that changes."""

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from .contents import UNWATCHED, Contents, Held, is_followed
from .dict_watch import WATCHER
from .identity import Identity
from .tables import CONFIG, HOOKS, OF_EVERY_MODULE, PARTS, Entry, Table, module_tables
from .values import CONTAINERS, MISSING, plain, readers, settings_token, tensors_in, token, word

TRAINING, FORWARD, CLASS = "training", "forward", "__class__"
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
# What PyTorch notes of a module's hooks and leaves behind when they are gone.
LEFT_BY_HOOKS = frozenset(("_is_full_backward_hook",))
# Attributes that hold watched dicts.
HOLD_TABLES = frozenset((*PARTS, *HOOKS, CONFIG))
_forward_of = operator.attrgetter(FORWARD)
# Names, as a table, the functions that recorded work stands for; no object has this id.
CODE = 0


@dataclass(frozen=True, slots=True)
class Exempt:
    """What may change of a model without changing what it computes, and upstream's functions that may not.

    Attributes:
        bookkeeping: Names of attributes that a train loop writes for its own use.
        own_hook: Whether a module's hook is the model's own code, which is recorded, or does its work elsewhere.
        label: Whether a module's attribute, given with its name and value, only tells the module from others.
        packages: Of Python, whose own globals and objects other than modules keep tensors of a pass for its backward.
        code: Returns functions that recorded work stands for, each at its place; no watcher sees them replaced.
        names: Of these places, for messages. Both grow while modules are imported.
        own_code: Returns one that some modules need and that is not upstream's, in words; None without one.
    """

    bookkeeping: frozenset[str] = frozenset()
    own_hook: Callable[[Callable[..., Any]], bool] = lambda hook: False
    label: Callable[[nn.Module, str, Any], bool] = lambda module, name, value: False
    packages: frozenset[str] = frozenset()
    code: Callable[[], list[Any]] = list
    names: Sequence[str] = ()
    own_code: Callable[[Iterable[nn.Module]], str | None] = lambda modules: None


NOTHING_EXEMPT = Exempt()


class _Left(Identity):
    """A parameter that left its place, whose memory may be much: nothing keeps it for the watch."""


class _Old(NamedTuple):
    """A former value, kept alive so that no other object takes its identity unless it has left, and its token."""

    value: Any
    token: Hashable

    @classmethod
    def of(cls, value: Any, stood: Hashable = None) -> "_Old":
        """Return what is noted of a value, for which `stood` or its token stood."""
        return cls(_Left(value) if isinstance(value, nn.Parameter) else value, stood or token(value))

    def is_back(self, now: Any) -> bool:
        """Whether a value is the former one."""
        if isinstance(self.value, _Left):
            return self.value.is_of(now)
        return self.value is now or token(now) == self.token

    def word(self) -> str:
        """Return the former value for a message."""
        return nn.Parameter.__name__ if isinstance(self.value, _Left) else word(self.value)


class _Seen(NamedTuple):
    """What a look found."""

    generation: int
    differences: "Differences"
    training: bool | tuple[bool, ...]


# What differs from how the model was when the watch began.
Differences = Mapping[Entry, Any]


class ModelWatch:
    """Follows one model from the moment that the object is made, until `close`.

    What the model's own forward leaves behind in attributes is its result and no difference: passes run inside
    `passing`. A value that comes back is no difference either.

    Args:
        roots: Modules that are followed with all below them.
        patched: Attributes that the plugin patches on a module, as (module, name).
        called: Modules whose own hooks run around a replay as well, because they are called in the usual way.
        exempt: What is no difference.

    Attributes:
        roots, exempt: See above.
        own_code: See `Exempt`.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        patched: Iterable[tuple[nn.Module, str]] = (),
        called: Sequence[nn.Module] = (),
        exempt: Exempt = NOTHING_EXEMPT,
    ) -> None:
        self._generation = 0
        self.roots, self.exempt = tuple(roots), exempt
        self._called, self._own_hook = tuple(called), exempt.own_hook
        self._ignored = LEFT_BY_HOOKS | exempt.bookkeeping
        self._patched = {Entry(id(vars(module)), name) for module, name in patched}
        # A module that leaves the model may come back: its tables are followed for as long as somebody holds them.
        self._tables: WeakValueDictionary[int, Table] = WeakValueDictionary()
        self._before: dict[Entry, _Old] = {}
        self._volatile: set[Entry] = set()
        self._passing = 0
        self._looks_once = self._looked = False
        self._touched: dict[Entry, _Old] = {}
        self._seen: _Seen | None = None
        self._tree: dict[nn.Module, str] = {}
        self._inside: dict[Entry, Any] = {}
        self._lists: tuple[list[Any] | set[Any], ...] = ()
        self._contents: dict[Entry, Any] = {}
        self._lengths: list[int] = []
        self._held = Held(())
        self._types: tuple[type, ...] = ()
        self._forwards: list[Callable[..., Any]] = []
        self._first_forwards: dict[type, Callable[..., Any]] = {}
        self._read_code, self.own_code = exempt.code, exempt.own_code
        self._code = self._read_code()
        self._first_code = list(self._code)
        self._follow()
        self._at_first = self._followed

    def _follow(self) -> None:
        """Follow the modules that the model consists of now."""
        self._tree_changed = False
        self._tree = {}
        for root in self.roots:
            for name, module in root.named_modules():
                self._tree.setdefault(module, name or type(module).__name__)
        followed = [table for module, name in self._tree.items() for table in module_tables(module, name)]
        for hooks in GLOBAL_HOOKS:
            followed.append(Table(f"torch.nn.modules.module.{hooks}", getattr(torch_module, hooks), hooks=True))
        self._followed: tuple[Table, ...] = tuple(map(self._add, followed))
        self._follow_unwatched()

    def _add(self, table: Table) -> Table:
        known = self._tables.get(id(table.values))
        if known is not None:
            return known
        number = id(table.values)  # may have been that of a table that is gone
        self._volatile = {entry for entry in self._volatile if entry.table != number}
        self._contents = {entry: held for entry, held in self._contents.items() if entry.table != number}
        self._tables[number] = table
        WATCHER.watch(table.values, self._note)
        return table

    def _follow_unwatched(self) -> None:
        """Follow what no watcher sees change: what attributes hold, the modules' classes and their `forward`."""
        followed: dict[int, bool] = {}
        self._inside = {}
        for module in self._tree:
            upstreams = type(module).__module__.partition(".")[0] in self.exempt.packages
            for name, value in vars(module).items():
                entry = Entry(id(vars(module)), name)
                if plain(value) or name in OF_EVERY_MODULE or self._left_by_passes(entry):
                    continue
                if upstreams and name != CONFIG and not isinstance(value, UNWATCHED):  # upstream's own, nested deep
                    continue
                if id(value) not in followed:
                    followed[id(value)] = is_followed(value)
                if followed[id(value)]:
                    self._inside[entry] = value
            self._contents.setdefault(Entry(id(vars(module)), CLASS), type(module))
        for entry, stands in self.tokens(self._inside).items():
            self._contents.setdefault(entry, stands)
        self._lists = tuple(value for value in self._inside.values() if isinstance(value, UNWATCHED))
        self._lengths = list(map(len, self._lists))
        self._held = Held(self._inside.values())
        self._classes = list(map(type, self._tree))
        self._types = tuple(dict.fromkeys(map(type, self._tree)))
        self._forwards = list(map(_forward_of, self._types))
        for kind, forward in zip(self._types, self._forwards, strict=True):
            self._first_forwards.setdefault(kind, forward)

    def close(self) -> None:
        """Follow nothing any more."""
        for table in self._tables.values():
            WATCHER.unwatch(table.values, self._note)
        self._at_first = self._followed = ()
        self._tables.clear()
        self._before, self._tree, self._types = {}, {}, ()
        self._inside, self._lists, self._classes, self._held = {}, (), [], Held(())

    @contextmanager
    def looked_at_once(self) -> Iterator[None]:
        """Inside, where nothing changes the model, only the first look is at what attributes hold."""
        before, self._looks_once = self._looks_once, True
        try:
            yield
        finally:
            self._looks_once = before
            self._looked = self._looked and before

    @contextmanager
    def passing(self, training: bool | None = None) -> Iterator[list[Entry]]:
        """Run a pass of the model itself inside; what it changes for good is a result of passes from now on.

        Yields:
            What the outermost pass has changed for good, once it has ended.

        Args:
            training: Mode of all modules inside; None leaves each in its own.
        """
        changed: list[Entry] = []
        held, before = self._held, [] if self._passing else self._held.now()
        lengths = {id(value): len(value) for value in (() if self._passing else self._lists)}
        self._passing += 1
        try:
            with _training_mode(self._tree, training):
                yield changed
        finally:
            self._passing -= 1
            if not self._passing:
                touched, self._touched = self._touched, {}
                changed += (entry for entry, old in touched.items() if not old.is_back(self._value(entry)))
                inside = held.changed(before)
                self._volatile.update(changed, self._left_inside(inside, lengths))
                if not self._inside.keys().isdisjoint(self._volatile):
                    self._generation += 1
                    self._follow_unwatched()

    def _left_inside(self, changed: Set[int], lengths: Mapping[int, int]) -> Iterator[Entry]:
        """Return the attributes whose values a pass has changed inside; lists only where they grow."""
        for entry, value in self._inside.items():
            if id(value) in changed and (id(value) not in lengths or len(value) != lengths[id(value)]):
                yield entry

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Put back what modules hold after passes inside, which are no training."""
        before = self.contents()
        try:
            yield
        finally:
            self.put_back(before)

    def put_back(self, before: Contents) -> None:
        """Let modules hold what they held, without taking it for a change of the model."""
        with WATCHER.silent():
            before.put_back()

    def contents(self) -> Contents:
        """Return what modules hold now."""
        return Contents(self._tree)

    @contextmanager
    def undone_by_errors(self) -> Iterator[None]:
        """Put back what modules hold where something is raised inside: a capture that fails has computed nothing."""
        before = self.contents()
        try:
            yield
        except BaseException:
            self.put_back(before)
            raise

    def _note(self, values: dict[Any, Any], key: Hashable) -> None:
        entry = Entry(id(values), key)
        table = self._tables.get(entry.table)
        if table is None:
            return
        old = values.get(key, MISSING)
        if self._passing:
            if entry not in self._touched:
                self._touched[entry] = _Old.of(old)
        elif not (key in self._ignored or entry in self._patched or (entry in self._volatile and not plain(old))):
            self._generation += 1
            self._tree_changed |= table.submodules or key in HOLD_TABLES or bool(readers(old))
            self._before.setdefault(entry, _Old.of(old, self._contents.get(entry)))

    def _value(self, entry: Entry) -> Any:
        table = self._tables.get(entry.table)
        return MISSING if table is None else table.values.get(entry.key, MISSING)

    def look(self, contents: bool = True) -> int:
        """Look at what no watcher sees; returns a number that grows whenever something may have changed.

        Args:
            contents: Also look at what attributes hold and of which classes modules are, besides how long lists are.
        """
        lengths = list(map(len, self._lists))
        forwards = list(map(_forward_of, self._types))
        if lengths != self._lengths or forwards != self._forwards:
            self._lengths, self._forwards = lengths, forwards
            self._generation += 1
        elif contents and not self._looked and self._differs():
            self._held = Held(self._inside.values())
            self._code = self._read_code()
            self._tree_changed |= list(map(type, self._tree)) != self._classes
            self._generation += 1
        self._looked = self._looked or (contents and self._looks_once)
        return self._generation

    def _differs(self) -> bool:
        held, classes = self._held.changed(), list(map(type, self._tree))
        return bool(held) or classes != self._classes or self._read_code() != self._code

    def _look(self) -> "_Seen":
        if self._seen is None or self._seen.generation != self._generation:
            differences = self._compare()
            if self._tree_changed or any(map(readers, differences.values())):
                self._follow()
                differences = self._compare()
            self._seen = _Seen(self._generation, differences, self._modes())
        return self._seen

    def _compare(self) -> dict[Entry, Any]:
        differences = {}
        for entry, old in list(self._before.items()):
            now = self._value(entry)
            if entry.table not in self._tables or old.is_back(now):
                del self._before[entry]
            elif self._counts(entry, old.value, now):
                differences[entry] = now
        for entry, stands in self.tokens(self._inside).items():
            if stands != self._contents[entry]:
                differences[entry] = self._inside[entry]
        for module in self._tree:
            entry = Entry(id(vars(module)), CLASS)
            if self._contents.get(entry) is not type(module):
                differences[entry] = type(module)
        for kind, forward in self._first_forwards.items():
            if _forward_of(kind) is not forward:
                differences[Entry(id(kind), FORWARD)] = _forward_of(kind)
        self._first_code += self._code[len(self._first_code) :]  # of modules that were imported since
        for place, first, now in zip(self.exempt.names, self._first_code, self._code, strict=False):
            if first != now:
                differences[Entry(CODE, place)] = now
        return differences

    def tokens(self, entries: Mapping[Entry, Any]) -> dict[Entry, Hashable]:
        """Return what stands for the values at some entries; many modules may hold one of them."""
        known: dict[tuple[int, bool], Hashable] = {}
        tokens = {}
        for entry, value in entries.items():
            key = id(value), entry.key == CONFIG
            if key not in known:
                settings = entry.key == CONFIG and bool(readers(value)) and hasattr(value, "__dict__")
                known[key] = settings_token(value, self._ignored) if settings else token(value)
            tokens[entry] = known[key]
        return tokens

    def _counts(self, entry: Entry, old: Any, now: Any) -> bool:
        table = self._tables[entry.table]
        if table.hooks or entry.key == TRAINING:
            return False
        plain_only = table.plain_only or entry in self._volatile
        return not plain_only or (plain(old) and plain(now))

    def _modes(self) -> bool | tuple[bool, ...]:
        modes = tuple(module.training for module in self._tree if type(module) not in CONTAINERS)
        return modes[0] if len(set(modes)) == 1 else modes

    @property
    def training(self) -> bool | tuple[bool, ...]:
        """The mode of all modules, or that of each where they differ."""
        return self._look().training

    def foreign_hook(self, modules: Iterable[nn.Module]) -> str | None:
        """Return a hook on one of these modules, or on all, that a replay would not run, in words; None without one."""
        return foreign_hook([(self.name(m), m) for m in modules if m not in self._called], self._own_hook)

    def trained_attribute(self, modules: Iterable[nn.Module]) -> str | None:
        """Return a tensor that requires a gradient and is no parameter, in words; None without one.

        A replay gives gradients to parameters and inputs alone. What a pass has left in an attribute is no such tensor.
        """
        differences = self._look().differences
        for module in modules:
            for table in (vars(module), module._buffers):
                for name, value in table.items():
                    entry = Entry(id(table), name)
                    if not (isinstance(value, torch.Tensor) and value.requires_grad) or self._left_by_passes(entry):
                        continue
                    if value.is_leaf or entry in differences:
                        return f"{self.name(module)}.{name}"
        return None

    def _left_by_passes(self, entry: Entry) -> bool:
        return entry.key in self._ignored or entry in self._volatile

    def name(self, module: nn.Module) -> str:
        """Return a module's name for messages."""
        return self._tree.get(module, type(module).__name__)

    def differences(self) -> Differences:
        """Return what differs now from when the watch began, besides modes and hooks."""
        return self._look().differences

    def followed(self) -> tuple[Table, ...]:
        """Return the tables of the model's modules as they are now; whoever keeps them has them followed on."""
        self._look()
        return self._followed

    def holders(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Return the followed modules that have one of these below them."""
        held = set(modules)
        return [module for module in self._tree if module not in held and not held.isdisjoint(module.modules())]

    def tensors_of(self, modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
        """Return the tensors that modules hold besides parameters and what a pass leaves behind."""
        for module in modules:
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)
            for name, value in vars(module).items():
                if name not in OF_EVERY_MODULE and not self._left_by_passes(Entry(id(vars(module)), name)):
                    yield from (tensor for tensor in tensors_in(value) if not tensor.requires_grad)

    def tables_of(self, modules: Iterable[nn.Module]) -> frozenset[int]:
        """Return what is followed of modules, without those below them, as `Entry.table` names it."""
        found = {id(table.values) for module in modules for table in module_tables(module, "")}
        return frozenset(found.union((CODE,), (id(type(module)) for module in modules)))

    def described(self, entries: Iterable[Entry]) -> str:
        """Return in words what changed at some entries."""
        kinds = {id(kind): kind.__name__ for kind in self._first_forwards} | {CODE: "upstream's code"}
        said = []
        for entry in entries:
            table = self._tables.get(entry.table)
            name = kinds.get(entry.table, "a class") if table is None else table.name
            if entry in self._before:
                said.append(f"{name}: {entry.key} {self._before[entry].word()} -> {word(self._value(entry))}")
            else:
                said.append(f"{name}: {entry.key} changed")
        return "; ".join(said[:3]) + (f" and {len(said) - 3} more" if len(said) > 3 else "")

    def ignores(self, name: str) -> bool:
        """Whether somebody else reads or writes an attribute."""
        return name in self._ignored

    def place(self, frame: FrameType | None) -> str:
        """Return in words where in the model a frame runs."""
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in self._tree:
                return f"{self.name(owner)} ({frame.f_code.co_filename}:{frame.f_lineno})"
            frame = frame.f_back
        return "the model"

    def left(self, entries: Iterable[Entry]) -> list[Entry]:
        """Return those of some entries that hold a plain value or tensors, and that somebody else does not write."""
        values = ((entry, self._value(entry)) for entry in entries if not self._left_for_others(entry))
        return [entry for entry, value in values if plain(value) or any(True for _ in tensors_in(value))]

    def _left_for_others(self, entry: Entry) -> bool:
        return entry.key in self._ignored or entry.key == TRAINING or entry in self._patched


def foreign_hook(
    modules: Iterable[tuple[str, nn.Module]], own_hook: Callable[[Callable[..., Any]], bool]
) -> str | None:
    """Return a hook on one of these modules, or on all, that is not the model's own, in words; None without one."""
    hooked = [(name, getattr(m, hooks)) for name, m in modules for hooks in HOOKS]
    hooked += [("every module", getattr(torch_module, hooks)) for hooks in GLOBAL_HOOKS]
    for name, hooks in hooked:
        for hook in hooks.values():
            if not own_hook(hook):
                return f"{name} has the hook {getattr(hook, '__qualname__', type(hook).__qualname__)}"
    return None


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
