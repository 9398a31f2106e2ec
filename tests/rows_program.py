"""A module over rows as a region program: any count up to a bucket's, the rest zero."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from bridge_cg_plugin.graphs.program import RegionProgram, TensorSpec


class RowsProgram(RegionProgram):
    """See `RegionProgram`.

    Args:
        model: What computes.
        row: Shape of a row.
        outputs: How many tensors the model gives, as many rows in each.
        forward: Called instead of the model, with `[rows, *row]` float32.
        modules: Returns what of the model `forward` uses; None is all of it.
    """

    name = "rows"

    def __init__(
        self,
        model: nn.Module,
        row: Sequence[int],
        outputs: int = 1,
        forward: Callable[[Tensor], Tensor | tuple[Tensor, ...]] | None = None,
        modules: Callable[[], Sequence[nn.Module]] | None = None,
    ) -> None:
        self.model = model
        self._row, self._outputs = tuple(row), outputs
        self._forward, self._modules = forward or model, modules or (lambda: (model,))

    def modules(self):
        return self._modules()

    def input_specs(self, bucket):
        return {"x": TensorSpec((bucket.tokens, *self._row), torch.float32, differentiable=True)}

    def size(self, batch):
        return len(batch)

    def load(self, buffers, batch):
        buffers["x"][: len(batch)].copy_(batch.detach())
        buffers["x"][len(batch) :].zero_()

    def forward(self, buffers, bucket):
        outputs = self._forward(buffers["x"])
        return tuple(outputs) if self._outputs > 1 else (outputs,)

    def recording(self):
        return nullcontext()

    def differentiable_inputs(self, batch):
        return (batch,)
