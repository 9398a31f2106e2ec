"""Eager decoders that compute as many rows of a pack as graphs do: another number of rows rounds differently."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from bridge_cg_plugin.upstream.wrappers import overridden
from tests.models.packed_parity import at_rows


@contextmanager
def padded(models: Iterable[nn.Module], buckets: Sequence[int]) -> Iterator[None]:
    """Inside, language models' decoders compute all rows of the smallest bucket that holds a pack.

    Args:
        models: Whose decoders run eager.
        buckets: Tokens, ascending. A longer pack is computed as it is.
    """

    def rows_of(tokens: int) -> int:
        return next((bucket for bucket in buckets if bucket >= tokens), tokens)

    with ExitStack() as stack:
        for decoder in [found for model in models for found in decoders_of(model)]:
            forward = type(decoder).forward.__get__(decoder)
            stack.enter_context(overridden(decoder, "forward", at_rows(forward, rows_of)))
        yield


def decoders_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoders of language models inside, not those of their encoders."""
    return [module for name, module in model.named_modules() if f".{name}".endswith(".language_model.decoder")]
