"""Deepstack mergers of Bridge's vision model on the side stream of a recording."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn

from ...graphs.modules import every_module
from ...graphs.recordings.side_stream import current_side_stream, output_on_side_stream
from ..attributes import overridden
from ..seams.registry import seam

_, MERGERS = seam("vision_block_parts").attributes


@contextmanager
def side_mergers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run deepstack mergers and their backward concurrently with the layers that follow them.

    Mergers of tensor-parallel ranks reduce sums, which stay in the order of all others on the main stream.
    """
    with ExitStack() as stack:
        for module in every_module(modules) if current_side_stream() is not None else ():
            for merger in getattr(module, MERGERS, ()):
                if (getattr(merger.config, "tensor_model_parallel_size", None) or 1) == 1:
                    stack.enter_context(overridden(merger, "forward", partial(_on_side_stream, merger.forward)))
        yield


def _on_side_stream(original: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
    return output_on_side_stream(original, hidden_states)
