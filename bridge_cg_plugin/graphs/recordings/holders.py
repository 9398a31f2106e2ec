"""Which attribute or global keeps tensors."""

import gc
import types
from collections.abc import Iterator, Sequence, Set
from typing import Any

from torch import Tensor, nn

from ..changes.model_watch import ModelWatch
from ..changes.tables import PARTS

# Objects between a tensor and a module or a global, at most.
DEPTH = 8
# Packages whose own objects keep tensors of a pass for its backward and for replays.
OWN = frozenset(("torch", __name__.partition(".")[0]))
# What keeps an object only for the time of a call.
PASSING = (types.FrameType, types.TracebackType, types.GeneratorType, types.CoroutineType)


def tensors_of_storages(storages: Set[int]) -> list[Tensor]:
    """Return the tensors of this process, as Python has them, whose memory is one of some storages."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return [each for each in tensors if _storage(each) in storages]


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def holder_of(tensors: Sequence[Tensor], watch: ModelWatch) -> str | None:
    """Return in words what keeps one of some tensors for good: a module's attribute, or a global; None without one.

    Args:
        tensors: The tensors.
        watch: Follows the model; names its modules and what may keep tensors.
    """
    names = {id(tensor): "" for tensor in tensors}
    values: list[Any] = list(tensors)
    seen, own = {id(tensors), *names}, OWN | watch.exempt.packages
    for _ in range(DEPTH if tensors else 0):
        seen.add(id(values))
        holders = gc.get_referrers(*values)
        seen.add(id(holders))
        values, held_by, names = [], names, {}
        for holder in holders:
            if id(holder) in seen or isinstance(holder, PASSING):
                continue
            seen.add(id(holder))
            name = next((_joined(key, held_by[id(value)]) for key, value in _held(holder) if id(value) in held_by), "")
            root = _root(holder, watch)
            if watch.ignores(name) if isinstance(holder, nn.Module) else _package(holder, root) in own:
                continue
            if root is not None:
                return f"{root}.{name}"
            values.append(holder)
            names[id(holder)] = name
    return None


def _package(holder: Any, root: str | None) -> str:
    """Return the package that an object's class, or a global, is of."""
    return (root or type(holder).__module__).partition(".")[0]


def _root(holder: Any, watch: ModelWatch) -> str | None:
    """Return the name of a module of the model or of Python; None for another object."""
    if isinstance(holder, nn.Module):
        return watch.name(holder)
    return str(holder.get("__name__")) if isinstance(holder, dict) and "__builtins__" in holder else None


def _held(holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, with its attribute's name or its key, if it has one."""
    named = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    yield from ((str(key), value) for key, value in named.items())
    yield from (("", value) for value in gc.get_referents(holder))


def _joined(key: str, name: str) -> str:
    return name if key in PARTS else ".".join(filter(None, (key, name)))
