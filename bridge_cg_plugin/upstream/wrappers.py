"""Modules in which Megatron wraps a model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..graphs.changes.dict_watch import WATCHER
from ..graphs.instance import modules_where

WRAPPER_DEPTH = 8
MAX_SEQLENS = ("max_seqlen_q", "max_seqlen_kv")
# Where a model holds the model that has parts of its own.
INNER_MODELS = ("model", "thinker", "llava_model")


def unwrapped(model: nn.Module) -> list[nn.Module]:
    """Return a model and what its wrappers hold, outermost first."""
    found = []
    for _ in range(WRAPPER_DEPTH):
        found.append(model)
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return found


def chunks_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the chunks of a model: itself where a loop has not divided it."""
    return [model] if isinstance(model, nn.Module) else list(model)


def holders(chunks: nn.Module | Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield what may be a model with parts of its own: every module under wrappers, and its `INNER_MODELS`."""
    for chunk in chunks_of(chunks):
        for module in unwrapped(chunk):
            yield module
            inner = (getattr(module, name, None) for name in INNER_MODELS)
            yield from (model for model in inner if isinstance(model, nn.Module))


def config_of(model: nn.Module | Sequence[nn.Module]) -> Any:
    """Return the config of a model under any wrapper; None without one."""
    chunks = chunks_of(model)
    return getattr(unwrapped(chunks[0])[-1], "config", None) if chunks else None


def pack_params(offsets: Mapping[str, Any], longest: int, **others: Any) -> Any:
    """Return megatron-core's metadata of a pack; a bound of lengths that is a number, so that nothing reads the device.

    Args:
        offsets: `cu_seqlens` by name, `[documents + 1]` int32.
        longest: No document has more tokens.
        others: Further fields.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(qkv_format="thd", **offsets, **dict.fromkeys(MAX_SEQLENS, longest), **others)


@contextmanager
def overridden(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module or object; what it was, absent included, comes back."""
    namespace = vars(owner)
    absent, before = name not in namespace, namespace.get(name)
    # A module's own methods look for parameters: ten times as slow, hundreds of times in each capture.
    is_plain = isinstance(owner, nn.Module) and not isinstance(value, (Tensor, nn.Module))
    change, remove = (object.__setattr__, object.__delattr__) if is_plain else (setattr, delattr)
    # Of a module all is read again where a pass of it is over; of a configuration what a write tells.
    silent = WATCHER.silent if isinstance(owner, nn.Module) else nullcontext
    with silent():
        change(owner, name, value)
    try:
        yield
    finally:
        with silent():
            if absent:
                remove(owner, name)
            else:
                change(owner, name, before)


@contextmanager
def forwards_replaced(
    modules: Sequence[nn.Module], forward: Callable[..., Any], wanted: Callable[[nn.Module], bool]
) -> Iterator[None]:
    """Replace the `forward` of some modules.

    Args:
        modules: Roots of the modules.
        forward: Called in its place, with the module first.
        wanted: Whether a module's is replaced.
    """
    with ExitStack() as stack:
        for module in modules_where(wanted, modules):
            stack.enter_context(overridden(module, "forward", partial(forward, module)))
        yield
