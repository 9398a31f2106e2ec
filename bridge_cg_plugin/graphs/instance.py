"""One method of a module, replaced on the instance; the modules below others."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

# By the module's id, and the name: the first of those that stand in for one method now.
_replaced: "WeakValueDictionary[tuple[int, str], InstanceMethod]" = WeakValueDictionary()


class StandIn(partial[Any]):
    """What takes a method's place; in a copy of the module, the module's own method is there instead.

    Attributes:
        original: The module's own method, bound.
    """

    original: Callable[..., Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.original,)


def _itself(method: Callable[..., Any]) -> Callable[..., Any]:
    return method


class InstanceMethod:
    """Puts another callable in the place of a module's method, on the instance, until `restore`.

    Args:
        module: The module.
        name: Of the method.
        method: What takes its place.

    Attributes:
        attribute: What was on the instance before; None where the class's method was called.
    """

    def __init__(self, module: nn.Module, name: str, method: Callable[..., Any]) -> None:
        self.module, self.name, self._method = module, name, StandIn(method)
        self.attribute = module.__dict__.get(name)
        self._method.original = self.original
        setattr(module, name, self._method)
        _replaced.setdefault((id(module), name), self)

    @property
    def original(self) -> Callable[..., Any]:
        """The method from before, bound: the class's as it is now, where none was on the instance."""
        of_class: Any = getattr(type(self.module), self.name)
        method: Callable[..., Any] = of_class.__get__(self.module) if self.attribute is None else self.attribute
        return method

    def restore(self) -> None:
        """Put back what was on the instance, nothing included, unless somebody replaced the method since."""
        if _replaced.get(key := (id(self.module), self.name)) is self:
            del _replaced[key]
        if self.module.__dict__.get(self.name) is not self._method:
            return
        if self.attribute is not None:
            setattr(self.module, self.name, self.attribute)
        else:
            del self.module.__dict__[self.name]


def own_attribute(owner: object, name: str) -> Any:
    """Return what an object's `__dict__` holds under a name, beneath what stands in for a method; None without it."""
    first = _replaced.get((id(owner), name))
    return vars(owner).get(name) if first is None else first.attribute


def own_method(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return a module's own method, bound, beneath what stands in for it."""
    first = _replaced.get((id(module), name))
    method: Callable[..., Any] = getattr(module, name) if first is None else first.original
    return method


def every_module(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the roots and all modules below them, each once, in the order of `nn.Module.modules`."""
    found, waiting = dict[nn.Module, None](), list(reversed(roots))
    while waiting:  # that method also makes names, a tenth of a capture's time
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return list(found)


def has_parameters(module: nn.Module) -> bool:
    """Whether a module itself has parameters."""
    return bool(module._parameters)


# By what was asked and of which roots; None where modules may change between two questions.
_answers: dict[tuple[Any, ...], list[nn.Module]] | None = None


@contextmanager
def asked_once() -> Iterator[None]:
    """Let `modules_where` ask each question once inside, where nobody else changes modules."""
    global _answers
    before, _answers = _answers, {}
    try:
        yield
    finally:
        _answers = before


def modules_where(wanted: Callable[[nn.Module], bool], roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Return those of `every_module` for which something holds.

    Args:
        wanted: Whether it holds.
        roots: Roots of the modules.
    """
    question = (wanted, *map(id, roots))
    answers = {} if _answers is None else _answers
    if question not in answers:
        answers[question] = list(filter(wanted, every_module(roots)))
    return answers[question]
