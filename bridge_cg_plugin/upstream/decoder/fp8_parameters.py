"""Parameters that are kept in fp8: where a graph reads their values, and whether these are there.

An optimizer writes values and scales where they are. A product of a backward reads values by column, on Hopper a
transpose that is made of the others: by data parallelism once parameters are gathered, or by the next eager forward.
"""

from collections.abc import Iterator, Sequence
from itertools import compress, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...graphs.errors import CaptureError
from ...graphs.modules import every_module

# Where Transformer Engine's tensors have values and scales: those with one scale, and those with a scale for a block.
COLUMNS, STALE = "_transpose", "_transpose_invalid"
WITH_ONE_SCALE = ("_data", COLUMNS, "_scale_inv")
WITH_SCALES = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
NOTHING: dict[str, Any] = {}


class _Values(NamedTuple):
    """A parameter's values when this was made.

    Attributes:
        parameters: What its module keeps parameters in.
        name: Its name there.
        addresses: Of what its tensor holds, by their names there.
    """

    parameters: dict[str, nn.Parameter | None]
    name: str
    addresses: dict[str, int]


class QuantizedParameters:
    """Where parameters in fp8 have their values: a look at all of them takes no line of Python for each."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Values] = {}
        self._tables: list[dict[str, nn.Parameter | None]] = []
        self._names: list[str] = []
        # By what tensors hold: which of the parameters do, and where.
        self._places: dict[str, list[int]] = {}
        self._addresses: list[list[int]] = []

    def keep(self, modules: Sequence[nn.Module]) -> None:
        """Note where these modules' parameters in fp8, too, have their values.

        Raises:
            CaptureError: A parameter that was noted before has them elsewhere.
        """
        found = dict(_quantized_parameters(modules))
        known = self._known
        if any(known[place].addresses != found[place].addresses for place in known.keys() & found.keys()):
            raise CaptureError("parameters in fp8 lie elsewhere than earlier recordings read")
        known.update(found)
        self._tables, self._names = ([getattr(v, each) for v in known.values()] for each in ("parameters", "name"))
        self._places, addresses = {}, dict[str, list[int]]()
        for place, values in enumerate(known.values()):
            for name, address in values.addresses.items():
                self._places.setdefault(name, []).append(place)
                addresses.setdefault(name, []).append(address)
        self._addresses = list(addresses.values())

    def are_there(self) -> bool:
        """Whether all values are where they were."""
        held = self._held()
        try:
            found = [list(map(Tensor.data_ptr, self._in(held, name))) for name in self._places]
        except TypeError:  # one is gone
            return False
        return found == self._addresses

    def refresh(self) -> None:
        """Make what is read by column of values that were written since, as eager's next forward would."""
        places = self._places.get(COLUMNS, ())
        held = map(self._held().__getitem__, places)
        for place in compress(places, map(dict.get, held, repeat(STALE))):
            complete(self._tables[place][self._names[place]])

    def _held(self) -> list[dict[str, Any]]:
        """Return what the parameters hold now: while one is recorded, another stands in for it."""
        return list(map(getattr, map(dict.get, self._tables, self._names), repeat("__dict__"), repeat(NOTHING)))

    def _in(self, held: Sequence[dict[str, Any]], name: str) -> Iterator[Any]:
        """Return what is held under a name where something was, None where nothing is now."""
        return map(dict.get, map(held.__getitem__, self._places[name]), repeat(name))


def _quantized_parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[tuple[int, str], _Values]]:
    """Yield modules' parameters that are kept in fp8, each with its module's id and its name."""
    for module in every_module(modules):
        for name, parameter in module._parameters.items():
            if is_quantized(parameter):
                held = {each: vars(parameter).get(each) for each in (*WITH_ONE_SCALE, *WITH_SCALES)}
                addresses = {each: value.data_ptr() for each, value in held.items() if isinstance(value, Tensor)}
                yield (id(module), name), _Values(module._parameters, name, addresses)


def is_quantized(parameter: object) -> bool:
    """Whether a parameter is kept in fp8."""
    return hasattr(parameter, "update_usage")


@torch.no_grad()
def complete(tensor: Any) -> None:
    """Let a quantized tensor have what both a forward and a backward read, and keep it where values are written."""
    if tensor._quantizer is not None:
        tensor._quantizer.set_usage(rowwise=True, columnwise=True)
    tensor.update_usage(rowwise_usage=True, columnwise_usage=True)


def complete_parameters(modules: Sequence[nn.Module]) -> None:
    """Let parameters in fp8 have what a backward reads before it is recorded, outside of a graph's memory."""
    for module in every_module(modules):
        for parameter in filter(is_quantized, module._parameters.values()):
            complete(parameter)
