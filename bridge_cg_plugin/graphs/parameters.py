"""Stand-ins for a region's parameters while it is recorded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

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
        self._signature = self._current_signature()

    def _current_signature(self) -> tuple[tuple[int, bool], ...]:
        return tuple((p.data_ptr(), p.requires_grad) for p in self.originals)

    def moved(self) -> bool:
        """Whether a parameter was replaced or changed its memory or `requires_grad` since this object was made."""
        replaced = any(module._parameters.get(name) is not parameter for module, name, parameter in self._places)
        return replaced or self._current_signature() != self._signature

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
