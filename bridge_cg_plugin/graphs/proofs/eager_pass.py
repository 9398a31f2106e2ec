"""Eager's pass over a microbatch that replays, beside it: with copies of what it read, from the states it began in."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_leaves, tree_map_only

from ..changes.dict_watch import WATCHER
from ..recordings.warm_up import copies_of


class Pass:
    """Eager's pass over a microbatch, which can run again later.

    Args:
        call: The call, with its arguments.
        outputs: Returns the region's outputs in what the call returned.
        owner: A module whose attributes may hold inputs as well.
    """

    def __init__(
        self, call: partial[Any], outputs: Callable[[Any], Sequence[Tensor]] = tuple, owner: nn.Module | None = None
    ) -> None:
        self._call, self._outputs, self._owner = call, outputs, owner
        self._copies: dict[int, Tensor] = {}
        self._attributes: dict[str, Any] = {}
        self._nudged: set[int] = set()

    def run(self) -> Sequence[Tensor]:
        """Return the outputs."""
        return self._outputs(self._call())

    def keep(self, inputs: Sequence[Tensor]) -> None:
        """Copy what is read of floating point, which training may overwrite; hosts know integers by their storage.

        Args:
            inputs: The region's differentiable inputs.
        """
        held = {} if self._owner is None else vars(self._owner)
        self._attributes = {name: value for name, value in held.items() if any(value is each for each in inputs)}
        read = tree_leaves((self._call.args, self._call.keywords, self._attributes))
        for tensor in (each for each in read if isinstance(each, Tensor) and each.is_floating_point()):
            self._copies[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        self._nudged = set(map(id, inputs)) or set(self._copies)

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """Return the leaf in the place of an argument; None without one."""
        return self._copies.get(id(tensor))

    def again(self, odd: bool | None = None) -> Sequence[Tensor]:
        """Return the outputs of a pass over the copies, which have no gradient yet.

        Args:
            odd: Which elements of the inputs are rounded up first, those at odd or at even places; None leaves all.
        """
        for copy in self._copies.values():
            copy.grad = None
        own = partial(self._own, odd)
        arguments = tree_map_only(Tensor, own, (self._call.args, self._call.keywords))
        held = {} if self._owner is None else vars(self._owner)
        with WATCHER.silent():
            held.update(tree_map_only(Tensor, own, self._attributes))
        try:
            return self._outputs(self._call.func(*arguments[0], **arguments[1]))
        finally:
            with WATCHER.silent():
                held.update(self._attributes)

    def _own(self, odd: bool | None, tensor: Tensor) -> Tensor:
        copy = self._copies.get(id(tensor), tensor)
        if odd is not None and id(tensor) in self._nudged:
            places = torch.arange(copy.numel(), device=copy.device).view(copy.shape)
            return torch.where(places % 2 == odd, copy * (1 + torch.finfo(copy.dtype).eps), copy)
        return copy.view_as(copy) if copy.requires_grad else copy  # no leaf, as what an earlier module returns


class Held:
    """What generators and tensors hold when the object is made. A graph's writes leave no trace in version counters.

    Args:
        generators: The generators.
        tensors: The tensors.
    """

    def __init__(self, generators: Iterable[torch.Generator], tensors: Iterable[Tensor]) -> None:
        self._states = {generator: generator.get_state() for generator in generators}
        self._values = copies_of(tensors)

    def drew_until(self, later: "Held") -> bool:
        """Whether a generator was used in between."""
        return not all(torch.equal(state, later._states[each]) for each, state in self._states.items())

    def put_back_generators(self) -> None:
        """Let generators be where they were."""
        for generator, state in self._states.items():
            generator.set_state(state)

    def put_back(self) -> None:
        """Let all be as it was."""
        self.put_back_generators()
        with torch.no_grad():
            for tensor, values in self._values:
                with _unsafe_preserve_version_counter(tensor):  # another microbatch may have saved it for its backward
                    tensor.copy_(values)
