"""Parts of Bridge's vision model that lead straight to an output, beside the main stream of a recording."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from ...graphs.modules import every_module
from ...graphs.side_stream import branch, current_side_stream
from ..attributes import overridden
from ..seams.registry import seam

_, MERGERS = seam("vision_block_parts").attributes


@contextmanager
def side_mergers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let deepstack mergers run beside the layers that follow them, and their backward beside those layers' backward.

    Mergers of tensor-parallel ranks reduce sums, which stay in the order of all others on the main stream.
    """
    with ExitStack() as stack:
        for module in every_module(modules) if current_side_stream() is not None else ():
            for merger in getattr(module, MERGERS, ()):
                if (getattr(merger.config, "tensor_model_parallel_size", None) or 1) == 1:
                    stack.enter_context(overridden(merger, "forward", functools.partial(_beside, merger.forward)))
        yield


def _beside(original: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
    return branch(original, hidden_states)
