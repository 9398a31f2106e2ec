"""Attributes that are another value for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def overridden(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module or object; what it was, absent included, comes back."""
    namespace = vars(owner)
    absent, before = name not in namespace, namespace.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if absent:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
