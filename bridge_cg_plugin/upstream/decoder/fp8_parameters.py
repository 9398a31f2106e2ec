"""Parameters that are kept in fp8: where a graph reads their values, and whether these are there.

An optimizer writes values and scales where they are. A product of a backward reads values by column, on Hopper a
transpose that is made of the others: by data parallelism once parameters are gathered, or by the next eager forward.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...graphs.modules import every_module

# Where Transformer Engine's tensors have values and scales: those with one scale, and those with a scale for a block.
COLUMNS, STALE = "_transpose", "_transpose_invalid"
WITH_ONE_SCALE = ("_data", COLUMNS, "_scale_inv")
WITH_SCALES = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")


class QuantizedParameter:
    """Where a parameter has its values when the object is made.

    Args:
        parameters: What its module keeps parameters in.
        name: Its name there.
    """

    def __init__(self, parameters: dict[str, nn.Parameter | None], name: str) -> None:
        self._parameters, self._name = parameters, name
        held = self._held()
        self._names = [n for n in (*WITH_ONE_SCALE, *WITH_SCALES) if isinstance(held.get(n), Tensor)]
        self.addresses = self._find()

    def _held(self) -> dict[str, Any]:
        return getattr(self._parameters.get(self._name), "__dict__", {})

    def _find(self) -> list[int | None]:
        values = map(self._held().get, self._names)
        return [None if value is None else value.data_ptr() for value in values]

    @property
    def is_there(self) -> bool:
        """Whether the values are where they were."""
        return self._find() == self.addresses

    def refresh(self) -> None:
        """Make what is read by column of values that were written since, as eager's next forward would."""
        if COLUMNS in self._names and self._held().get(STALE):
            complete(self._parameters[self._name])


def quantized_parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[tuple[int, str], QuantizedParameter]]:
    """Yield modules' parameters that are kept in fp8, each with its module's id and its name."""
    for module in every_module(modules):
        for name, parameter in module._parameters.items():
            if is_quantized(parameter):
                yield (id(module), name), QuantizedParameter(module._parameters, name)


def is_quantized(parameter: object) -> bool:
    """Whether a parameter is kept in fp8."""
    return hasattr(parameter, "update_usage")


@torch.no_grad()
def complete(parameter: Any) -> None:
    """Let a quantized tensor have what both a forward and a backward read."""
    parameter.update_usage(rowwise_usage=True, columnwise_usage=True)


def complete_parameters(modules: Sequence[nn.Module]) -> None:
    """Let parameters in fp8 have what a backward reads before it is recorded, outside of a graph's memory."""
    for module in every_module(modules):
        for parameter in filter(is_quantized, module._parameters.values()):
            complete(parameter)
