"""Calls of an encoder whose images may be encoded by other ranks."""

from functools import partial
from typing import Any

from torch import Tensor

from ...graphs.workload import Call, Eager, Manager
from ..adapter import EncoderAdapter, EncoderBatch
from .exchange import ImageExchange


class BalancedCalls:
    """Runs calls with the images that this rank is to encode. Every rank of the exchange runs as many.

    Args:
        exchange: Levels the work of the ranks.
        adapter: The encoder's.
        manager: Runs an encoder's call on this rank.
    """

    def __init__(self, exchange: ImageExchange, adapter: EncoderAdapter, manager: Manager) -> None:
        self._exchange, self._adapter, self._manager = exchange, adapter, manager

    def __call__(self, call: Call, eager: Eager) -> Any:
        """Return what the encoder's forward returns for a call."""
        if call.refusal is not None:
            return self._encode_here(call, eager)
        return self._adapter.returned(self._exchange.encode(call.batch, self._encode))

    def _encode_here(self, call: Call, eager: Eager) -> Any:
        """Encode images that cannot move, after this rank's part in the exchange of the other ranks' images."""
        needed = self.without_images()
        returned = self._manager.run(call, eager)
        if needed is None:
            return returned
        first, *others = self._adapter.outputs(returned)
        return self._adapter.returned((first + needed.to(first), *others))

    def without_images(self) -> Tensor | None:
        """Take part in the exchange of a microbatch in which this rank has no image; see `ImageExchange`."""
        return self._exchange.without_images(self._encode)

    def _encode(self, batch: EncoderBatch) -> tuple[Tensor, ...]:
        """Encode a batch that did not come as a call of the encoder's forward."""
        call = Call(batch, tokens=batch.tokens, note=batch.shape)
        eager = partial(self._adapter.run, self._manager.eager_forward, batch)
        return self._adapter.outputs(self._manager.run(call, eager))
