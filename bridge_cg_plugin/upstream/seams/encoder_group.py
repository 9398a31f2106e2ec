"""Encoders of other packages: the entry points that name them. Imports neither torch nor those packages."""

from functools import cache
from importlib.metadata import entry_points

# An entry point's name is the class of the model's provider, its value the `EncoderFamily`.
GROUP = "bridge_cg_plugin.encoders"


@cache
def other_providers() -> tuple[tuple[str, str], ...]:
    """Return module and class of the providers that entry points name."""
    paths = (point.name.rpartition(".") for point in entry_points(group=GROUP))
    return tuple((module, provider) for module, _, provider in paths if module)
