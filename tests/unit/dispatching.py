"""megatron-core's exchange of tokens between ranks that hold different experts, on a CPU."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from megatron.core.transformer.moe import token_dispatcher

from .packs import ON_CPU


def on_the_host(tensor, as_numpy=False, record_stream=False):
    """Return counts as the dispatcher wants them, from a tensor that is on the CPU already."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


@contextmanager
def dispatching_on_cpu():
    """Let megatron-core's all-to-all dispatcher run without CUDA's streams."""
    stream = mock.MagicMock()  # on a CPU all has ended
    with ExitStack() as stack:
        stack.enter_context(ON_CPU())
        stack.enter_context(mock.patch.object(torch.cuda, "Stream", lambda *args, **kwargs: stream))
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", lambda *args: stream))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", lambda *args: ExitStack()))
        stack.enter_context(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", on_the_host))
        yield
