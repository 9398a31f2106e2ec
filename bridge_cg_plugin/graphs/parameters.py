"""Stand-ins for a region's parameters while it is recorded."""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from .modules import every_module


class ParameterAliases:
    """Fresh leaves over the storage of a set of modules' parameters.

    A parameter's gradient accumulator remembers the stream of its first use and the hooks that data parallelism put on
    it. Recording through aliases leaves both alone: no hook fires during capture, and an eager pass whose autograd
    graph is still alive cannot pull another stream into it.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        seen: dict[nn.Parameter, None] = {}
        for module in every_module(modules):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.append((module, name, parameter))
                    seen.setdefault(parameter)
        self.originals: tuple[nn.Parameter, ...] = tuple(seen)
        self.trainable: tuple[nn.Parameter, ...] = tuple(p for p in self.originals if p.requires_grad)
        self._modules = [module for module, _, _ in self._places]
        self._names = [name for _, name, _ in self._places]
        self._expected = [parameter for _, _, parameter in self._places]
        self._addresses, self._trained = self._memory(), self._training()

    def _memory(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.originals))

    def _training(self) -> list[bool]:
        return list(map(operator.attrgetter("requires_grad"), self.originals))

    def moved(self) -> bool:
        """Whether a parameter was replaced or changed its memory or `requires_grad` since this object was made."""
        # Hundreds of parameters, before every replay: no line of Python for each.
        there = map(dict.get, map(operator.attrgetter("_parameters"), self._modules), self._names)
        same = all(map(operator.is_, there, self._expected))
        return not same or self._memory() != self._addresses or self._training() != self._trained

    @contextmanager
    def active(self) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
        """Put the aliases in the modules for the duration; yields original -> alias."""
        aliases = {p: _alias(p) for p in self.originals}
        try:
            for module, name, parameter in self._places:
                module._parameters[name] = aliases[parameter]
            yield aliases
        finally:
            for module, name, parameter in self._places:
                module._parameters[name] = parameter


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    alias.__dict__.update(parameter.__dict__)
    return alias
