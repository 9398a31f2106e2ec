"""Whether something sees, changes or writes down the operations of a call, of which a replay shows none."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

# Returns the hooks on tensors that autograd saves, None without any.
_hooks_on_saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks
# Names that the hooks of a non-reentrant checkpoint on saved tensors begin with; other packages copy PyTorch's.
CHECKPOINT_HOOKS = ("_checkpoint_hook.", "_recomputation_hook.")
_tracing_state = torch._C._get_tracing_state
_in_transform = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack


def operations_are_seen() -> bool:
    """Whether `torch.jit.trace`, a transform of `torch.func`, forward-mode AD or one of PyTorch's modes is around.

    The mode of `torch.device` and of `torch.set_default_device` says only where tensors are made.
    """
    return (
        _dispatch_modes() > 0
        or _in_transform()
        or _tracing_state() is not None
        or forward_ad._current_level >= 0
        or (_function_modes() > 0 and not all(map(_only_places, _get_current_function_mode_stack())))
    )


def _only_places(mode: Any) -> bool:
    return isinstance(mode, DeviceContext)


def is_one_graph() -> bool:
    """Whether what torch.compile traces now must be one graph, as by `fullgraph=True` and `torch.export`.

    It runs while torch.compile traces its caller, which must mark it with `torch.compiler.assume_constant_result`.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    tracer = InstructionTranslator.current_tx()
    return tracer.one_graph or getattr(tracer, "error_on_graph_break", False)


def in_checkpoint() -> bool:
    """Whether a non-reentrant checkpoint counts what autograd saves: its second forward has to save as much."""
    hooks: Sequence[Any] | None = _hooks_on_saved_tensors(False)
    return hooks is not None and getattr(hooks[0], "__qualname__", "").startswith(CHECKPOINT_HOOKS)
