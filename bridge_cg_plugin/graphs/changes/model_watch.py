"""The look at a model before its replays: which state it is in.

A dict watcher is a flag: whoever writes an attribute, a submodule, a hook or a setting raises it. At the first look of
a step, and once the flag is up, everything is compared that no watcher sees. Other looks take microseconds.
"""

import operator
import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from .dict_watch import MISSING, WATCHER
from .state import (
    CONFIG,
    CONTAINERS,
    HOLDING_TENSORS,
    HOOKS,
    NESTED,
    NOTHING_EXEMPT,
    OF_EVERY_MODULE,
    TRAINING,
    Contents,
    Exempt,
    Holder,
    Same,
    State,
    is_config,
    plain,
    tensors_in,
    token,
)

GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
# What PyTorch notes of a module's hooks and leaves behind when they are gone.
LEFT_BY_HOOKS = frozenset(("_is_full_backward_hook",))
_forward_of = operator.attrgetter("forward")

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


class ModelWatch:
    """Follows one model from the moment that the object is made, until `close`.

    What the model's own forward leaves behind in attributes is its result and no change: passes run inside `passing`.

    Args:
        roots: Modules that are followed with all below them.
        patched: Attributes that the plugin patches on a module, as (module, name).
        called: Modules whose own hooks run around a replay as well, because they are called in the usual way.
        exempt: What is no change.

    Attributes:
        roots, exempt: See above.
        ignored: Attributes that somebody else reads or writes.
        generation: What the last look returned.
        replaced: How often a parameter was replaced.
        step_number: Of the step under way, from 1; 0 outside.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        patched: Iterable[tuple[nn.Module, str]] = (),
        called: Sequence[nn.Module] = (),
        exempt: Exempt = NOTHING_EXEMPT,
    ) -> None:
        self.roots, self.exempt, self.generation, self.replaced = tuple(roots), exempt, 0, 0
        self._called, self.ignored = tuple(called), LEFT_BY_HOOKS | exempt.bookkeeping
        self._patched = tuple(patched)
        self._modules: dict[nn.Module, Holder] = {}
        self._holders: dict[int, Holder] = {}
        # By the dict's id: whose it is, and the attribute that it is the value of; nobody's are hooks.
        self._tables: dict[int, tuple[dict[Any, Any], list[tuple[Holder, str | None]]]] = {}
        # What is to be read again.
        self._dirty: set[Holder] = set()
        self._touched: dict[tuple[int, Hashable], Any] = {}
        self._written = self._rebuilt = True
        self._passing = self._still = self._steps = self.step_number = 0
        self._compared = False
        self._shipped = exempt.code()
        self._renew()

    def _walk(self) -> None:
        """Follow the modules that the model consists of now, with their configurations and classes."""
        known, self._holders, self._modules = self._holders, {}, {}
        for root in self.roots:
            for name, module in root.named_modules():
                if module not in self._modules:
                    self._modules[module] = self._hold(module, name or type(module).__name__, known)
        for module, holder in self._modules.items():
            config = vars(module).get(CONFIG)
            holder.others = [self._hold(config, f"{holder.name}.{CONFIG}", known)] if is_config(config) else []
            for base in type(module).__mro__:
                if base.__module__.partition(".")[0] not in ("torch", "builtins"):
                    holder.others.append(self._hold(base, f"{base.__module__}.{base.__qualname__}", known))
        before, self._tables = self._tables, {}
        for hooked in (torch_module, *self._modules):
            tables = (vars(hooked)[name] for name in (GLOBAL_HOOKS if hooked is torch_module else HOOKS))
            self._tables.update((id(table), (table, [])) for table in tables)
        for holder in self._holders.values():
            for table, attribute in holder.tables:
                self._tables.setdefault(id(table), (table, []))[1].append((holder, attribute))
        for number in self._tables.keys() - before.keys():
            WATCHER.watch(self._tables[number][0], self._note)
        for number in before.keys() - self._tables.keys():
            WATCHER.unwatch(before[number][0], self._note)

    def _hold(self, owner: Any, name: str, known: dict[int, Holder]) -> Holder:
        if id(owner) in self._holders:
            return self._holders[id(owner)]
        holder = known.get(id(owner))
        if holder is None:
            patched = {attribute for module, attribute in self._patched if module is owner}
            upstreams = type(owner).__module__.partition(".")[0] in self.exempt.packages
            holder = Holder(owner, name, self.ignored | patched, 0 if upstreams else NESTED)
        holder.name = name
        self._holders[id(owner)] = holder
        return holder

    def _renew(self) -> None:
        """Read again what has changed, or may have."""
        for holder in self._dirty:
            holder.read()
        if self._rebuilt:
            self._walk()
        self._dirty, self._written, self._rebuilt = set(), False, False
        self._kinds = list(map(type, self._modules))
        self._types = tuple(dict.fromkeys(self._kinds))
        self._forwards, self._code = list(map(_forward_of, self._types)), self.exempt.code()
        instances = [holder for holder in self._holders.values() if not isinstance(holder.owner, type)]
        self._contained = [(holder, attribute, table) for holder in instances for table, attribute in holder.tables]
        self._unwatched = [holder for holder in instances if holder.unwatched]
        self.generation += 1

    def close(self) -> None:
        """Follow nothing any more."""
        for table, _ in self._tables.values():
            WATCHER.unwatch(table, self._note)
        self._tables, self._holders, self._modules = {}, {}, {}
        self._contained, self._unwatched, self._kinds = [], [], []

    def _note(self, table: dict[Any, Any], key: Hashable, new: Any) -> None:
        """Raise the flag: a dict is about to change."""
        _, owners = self._tables.get(id(table), (None, None))
        if owners is None:
            return
        old = table.get(key, MISSING)
        if self._passing:
            self._touched.setdefault((id(table), key), old)
            return
        self._written |= not owners
        for holder, attribute in owners:
            name: Any = key if attribute is None else attribute
            both_plain = plain(old) and plain(new)
            if name in holder.ignored:
                continue
            if name in holder.left:
                # Of a class, passes of other models write it, too.
                if isinstance(holder.owner, type) or not both_plain or token(old) == token(new):
                    continue
                holder.left[name] += 1
            self._written = True
            self.replaced += isinstance(old, nn.Parameter) or isinstance(new, nn.Parameter)
            if name != TRAINING:
                self._dirty.add(holder)
                self._rebuilt |= attribute is None and not both_plain

    def look(self) -> int:
        """Look whether the model is as before; returns a number that grows whenever it may not be."""
        if not (self._passing or self._still):
            self._written |= list(map(_forward_of, self._types)) != self._forwards
            if self._written or not (self.step_number and self._compared):
                self._compare()
            if self._written:
                self._renew()
        return self.generation

    def _compare(self) -> None:
        """Look for changes that no watcher sees."""
        self._compared = True
        self._dirty.update(holder for holder in self._unwatched if holder.has_changed())
        if (kinds := list(map(type, self._modules))) != self._kinds:
            found = zip(self._modules.values(), kinds, self._kinds, strict=True)
            self._dirty.update(holder for holder, kind, before in found if kind is not before)
            self._rebuilt = True
        self._written |= bool(self._dirty) or self.exempt.code() != self._code

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside, as in a training step, only the first look compares everything, and each one after a write."""
        before = self.step_number
        if not before:
            self._steps, self._compared = self._steps + 1, False
            self.step_number = self._steps
        try:
            yield
        finally:
            self.step_number = before

    @contextmanager
    def looked_at_once(self) -> Iterator[None]:
        """Look, and take what was found for all looks inside, where nothing changes the model."""
        self.look()
        self._still += 1
        try:
            yield
        finally:
            self._still -= 1

    @contextmanager
    def passing(self, training: bool | None = None) -> Iterator[None]:
        """Run a pass of the model itself inside; what it changes for good is a result of passes from now on.

        Args:
            training: Mode of all modules inside; None leaves each in its own.
        """
        self.look()
        before = [] if self._passing else [(holder, holder.seen_unwatched()) for holder in self._unwatched]
        self._passing += 1
        try:
            with _training_mode(self._modules, training):
                yield
        finally:
            self._passing -= 1
            if not self._passing:
                touched, self._touched = self._touched, {}
                self._note_left(self._changed(touched), before)

    def _changed(self, touched: dict[tuple[int, Hashable], Any]) -> Iterator[tuple[Holder, str]]:
        """Yield the attributes that do not hold again what they held before a pass wrote them."""
        for (number, key), old in touched.items():
            table, owners = self._tables.get(number, ({}, []))
            now = table.get(key, MISSING)
            if owners and old is not now and token(old) != token(now):
                yield from ((holder, str(key) if attribute is None else attribute) for holder, attribute in owners)

    def _note_left(self, left: Iterable[tuple[Holder, str]], before: Iterable[tuple[Holder, Any]]) -> None:
        inside = ((holder, name) for holder, tokens in before for name in holder.left_inside(tokens))
        for holder, name in [*left, *inside]:
            if name not in holder.left and name not in holder.ignored and name != TRAINING:
                holder.left[name] = 0
                self._dirty.add(holder)
                self._written = self._rebuilt = True

    @contextmanager
    def undone(self, unless_it_ends: bool = False) -> Iterator[None]:
        """Put back what modules and upstream's places hold after passes inside, which are no training.

        Args:
            unless_it_ends: Only where something is raised, as by a capture that fails and has computed nothing.
        """
        before, code, ended = self.contents(), self.exempt.code(), False
        try:
            yield
            ended = True
        finally:
            if not (ended and unless_it_ends):
                before.put_back()
                self.exempt.put_back(code)

    def contents(self) -> Contents:
        """Return what modules and configurations hold now."""
        return Contents(self._contained, self._unwatched)

    def state(self, modules: Iterable[nn.Module]) -> State:
        """Return the state of modules, without those below them."""
        # What a container holds is a part of what its owner holds; some loops make new containers of the same modules.
        kept = (module for module in modules if module in self._modules and type(module) not in CONTAINERS)
        holders = [self._modules[module] for module in kept]
        others = dict.fromkeys(other for holder in holders for other in holder.others)
        # Upstream's functions are compared with those at the beginning, or when their module was imported.
        self._shipped += self._code[len(self._shipped) :]
        places = zip(self.exempt.names, self._shipped, self._code, strict=False)
        code = {place: Same(now) for place, first, now in places if first != now}
        return State([*((each.name, each.tokens) for each in (*holders, *others)), ("upstream's code", code)])

    def training(self) -> bool | tuple[bool, ...]:
        """Return the mode of all modules, or that of each where they differ."""
        modes = tuple(module.training for module in self._modules if type(module) not in CONTAINERS)
        return modes[0] if len(set(modes)) == 1 else modes

    def foreign_hook(self, modules: Iterable[nn.Module]) -> str | None:
        """Return a hook on one of these modules, or on all, that a replay would not run, in words; None without one."""
        called = self._called
        hooked = [(self.name(m), getattr(m, hooks)) for m in modules if m not in called for hooks in HOOKS]
        hooked += [("every module", getattr(torch_module, hooks)) for hooks in GLOBAL_HOOKS]
        for name, hooks in hooked:
            for hook in hooks.values():
                if not self.exempt.own_hook(hook):
                    return f"{name} has the hook {getattr(hook, '__qualname__', type(hook).__qualname__)}"
        return None

    def trained_attribute(self, modules: Iterable[nn.Module]) -> str | None:
        """Return a tensor that requires a gradient and is no parameter, in words; None without one.

        A replay gives gradients to parameters and inputs alone. What a pass has left in an attribute is no such tensor.
        """
        found = ((m, name) for m, name, v in self._values(modules) if isinstance(v, torch.Tensor) and v.requires_grad)
        return next((f"{self.name(module)}.{name}" for module, name in found), None)

    def tensors_of(self, modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
        """Return the tensors that modules hold besides parameters and what a pass leaves behind."""
        return (t for *_, value in self._values(modules) for t in tensors_in(value) if not t.requires_grad)

    def _values(self, modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Any]]:
        """Yield buffers, and what may hold tensors in attributes that no pass left and nobody else writes."""
        passed_over = OF_EVERY_MODULE.union(self.ignored)
        for module in modules:
            left = self._modules[module].left if module in self._modules else ()
            yield from ((module, *buffer) for buffer in module._buffers.items())
            for name, value in vars(module).items():
                if name not in passed_over and name not in left and isinstance(value, HOLDING_TENSORS):
                    yield module, name, value

    def name(self, module: nn.Module) -> str:
        """Return a module's name for messages."""
        return self._modules[module].name if module in self._modules else type(module).__name__

    def above(self, modules: Iterable[nn.Module]) -> list[nn.Module]:
        """Return the followed modules that have one of these below them."""
        held = set(modules)
        return [module for module in self._modules if module not in held and not held.isdisjoint(module.modules())]

    def place(self, frame: FrameType | None) -> str:
        """Return in words where in the model a frame runs, and the line, PyTorch's own aside."""
        at = frame
        while at is not None and at.f_code.co_filename.startswith(_TORCH):
            at = at.f_back
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in self._modules:
                line = frame if at is None else at
                return f"{self.name(owner)} ({line.f_code.co_filename}:{line.f_lineno})"
            frame = frame.f_back
        return "the model"


@contextmanager
def _training_mode(modules: Iterable[nn.Module], training: bool | None) -> Iterator[None]:
    """Put modules into training or evaluation mode; every module's own mode comes back."""
    switched = [] if training is None else [m for m in modules if m.training != training]
    for module in switched:
        module.training = bool(training)
    try:
        yield
    finally:
        for module in switched:
            module.training = not training
