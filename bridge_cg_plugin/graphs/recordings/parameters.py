"""Stand-ins for a region's parameters while it is recorded."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ...upstream_types import MegatronParameter
from ..changes.dict_watch import WATCHER
from ..instance import every_module

# Where a backward begins: an output, or its place in the autograd graph where the output's memory is not kept.
Root = Tensor | GradientEdge
# Marks an alias whose gradient autograd hands on.
HANDED = "_handed_on"


def sum_of(weight: MegatronParameter) -> Tensor | None:
    """Return the `main_grad` to which the plugin may add a weight's gradient while it is recorded."""
    return None if hasattr(weight, HANDED) else getattr(weight, "main_grad", None)


class ParameterAliases:
    """Fresh leaves over the storage of a set of modules' parameters.

    A parameter's gradient accumulator remembers the stream of its first use and the hooks that data parallelism put on
    it. Recording through aliases leaves both alone: no hook fires during capture, and an eager pass whose autograd
    graph is still alive cannot pull another stream into it.

    Attributes:
        originals: The parameters, each once.
        trainable: Those that required a gradient when the object was made.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._places = [
            (module, name, parameter)
            for module in every_module(modules)
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.originals: tuple[nn.Parameter, ...] = tuple(dict.fromkeys(p for _, _, p in self._places))
        self.trainable: tuple[nn.Parameter, ...] = tuple(p for p in self.originals if p.requires_grad)

    def replaced(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Return those whose place another parameter has now, with their modules and names."""
        now = [module._parameters.get(name) for module, name, _ in self._places]
        found = zip(self._places, now, strict=True)
        return [place for place, there in found if there is not None and there is not place[2]]

    @contextmanager
    def active(self, handed: Collection[nn.Parameter] = ()) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
        """Put the aliases in the modules for the duration; yields original -> alias.

        Args:
            handed: Parameters whose gradient the plugin must not add to `main_grad` inside: see `sum_of`.
        """
        aliases = {p: _alias(p) for p in self.originals}
        for parameter in handed:
            aliases[parameter].__dict__[HANDED] = True
        try:
            with WATCHER.silent():
                for module, name, parameter in self._places:
                    module._parameters[name] = aliases[parameter]
            yield aliases
        finally:
            with WATCHER.silent():
                for module, name, parameter in self._places:
                    module._parameters[name] = parameter


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    with torch.inference_mode(parameter.is_inference()):  # outside, those of a model made inside can require nothing
        alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    alias.__dict__.update(parameter.__dict__)
    return alias


def reach_of(roots: Sequence[Root | None], targets: Mapping[int, Tensor]) -> tuple[frozenset[int], ...]:
    """Return the places of the targets that a backward from each root reaches; None has no backward.

    A function that gives an input no gradient counts as one that does: only its backward shows it.

    Args:
        roots: Where the backward through each output begins.
        targets: Leaves that require gradients, by place.
    """
    places = {get_gradient_edge(target).node: place for place, target in targets.items()}
    if not places:  # as in megatron-core's training: `main_grad` takes all
        return (frozenset(),) * len(roots)
    return tuple(frozenset() if root is None else _reached(root, places) for root in roots)


def _reached(root: Root, places: Mapping[Node, int]) -> frozenset[int]:
    start = (root if isinstance(root, GradientEdge) else get_gradient_edge(root)).node
    seen, waiting = {start}, [start]
    while waiting:
        fresh = {after for after, _ in waiting.pop().next_functions if after is not None} - seen
        seen |= fresh
        waiting += fresh
    return frozenset(places[node] for node in places.keys() & seen)
