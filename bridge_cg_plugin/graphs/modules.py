"""A region's modules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

_walked: dict[tuple[nn.Module, ...], list[nn.Module]] | None = None


def every_module(roots: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """Return the roots and all modules below them, each once, in the order of `nn.Module.modules`."""
    key, walked = tuple(roots), _walked  # another thread may end `walked_once` meanwhile
    if walked is None:
        return _walk(key)
    if key not in walked:
        walked[key] = _walk(key)
    return walked[key]


def _walk(roots: Sequence[nn.Module]) -> list[nn.Module]:
    return list(dict.fromkeys(module for root in roots for module in root.modules()))


@contextmanager
def walked_once() -> Iterator[None]:
    """Let `every_module` walk the same roots once inside, where no module comes or goes: a walk takes milliseconds."""
    global _walked
    before, _walked = _walked, {} if _walked is None else _walked
    try:
        yield
    finally:
        _walked = before
