"""Arguments of calls that the plugin wraps, by upstream's names for them."""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .patches import DriftError
from .seam import Seam
from .source_reader import NoSourceError, SourceReader

# (name, positional arguments, keyword arguments) -> the argument, None where the caller passes none.
FindArgument = Callable[[str, tuple[Any, ...], dict[str, Any]], Any]


def arguments_of(seam: Seam, function: Callable[..., Any]) -> FindArgument:
    """Return a lookup of a call's arguments by name, however the caller passes them.

    The signature of a wrapper that takes any arguments does not show their positions. It is called as upstream's own
    function is, whose source has them.

    Args:
        seam: Names the arguments.
        function: What is called: upstream's function, or what somebody put in its place.

    Raises:
        DriftError: The place of one of them is not known.
    """
    own = _positions(function)
    places = own if own.keys() >= set(seam.parameters) else {**_upstreams(seam), **own}
    unknown = [name for name in seam.parameters if name not in places]
    if unknown:
        raise DriftError(f"{seam.place} was replaced by a function that does not say where {', '.join(unknown)} stands")

    def find(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return kwargs[name] if name in kwargs else args[places[name]] if places[name] < len(args) else None

    return find


def _positions(function: Callable[..., Any]) -> dict[str, int]:
    """Return a function's named parameters with their places; one that is passed by name alone has the last."""
    parameters = inspect.signature(function).parameters.values()
    by_place = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {**{p.name: sys.maxsize for p in parameters if p.kind is p.KEYWORD_ONLY}, **_numbered(by_place)}


@functools.cache
def _upstreams(seam: Seam) -> dict[str, int]:
    """Return the same of upstream's own function, read from its source; nothing where there is none."""
    try:
        found = SourceReader().find(seam)
    except NoSourceError:
        return {}
    return {} if found is None else _numbered(found.parameters or ())


def _numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}
