"""The dicts of a module that decide what its forward computes."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

CONFIG = "config"
# Dicts of a module that decide which tensors and modules its forward uses.
PARTS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Entry(NamedTuple):
    """One entry of a watched dict.

    Attributes:
        table: The dict's `id`.
        key: Its key.
    """

    table: int
    key: Hashable


@dataclass(eq=False, slots=True, weakref_slot=True)
class Table:
    """A watched dict.

    Attributes:
        name: Of its owner and itself, for messages.
        values: The dict.
        hooks: Whether it holds hooks.
        submodules: Whether it holds a module's submodules.
        plain_only: Whether only changes of plain values count: a config's, which holds callables of the train loop.
    """

    name: str
    values: dict[Any, Any]
    hooks: bool = False
    submodules: bool = False
    plain_only: bool = False


def module_tables(module: nn.Module, name: str) -> Iterator[Table]:
    """Return what is followed of one module, under a name for messages."""
    yield Table(name, vars(module))
    for part in PARTS:
        yield Table(name, getattr(module, part), submodules=part == "_modules")
    for hooks in HOOKS:
        yield Table(f"{name}.{hooks}", getattr(module, hooks), hooks=True)
    for key, value in vars(module).items():
        if isinstance(value, dict) and key not in OF_EVERY_MODULE:
            yield Table(f"{name}.{key}", value)
    config = vars(module).get(CONFIG)
    if config is not None and hasattr(config, "__dict__"):
        yield Table(f"{name}.config", vars(config), plain_only=True)
