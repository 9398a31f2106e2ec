"""megatron-core's dataset helper, which Bridge compiles whenever training starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from ...wrappers import overridden


@contextmanager
def helper_as_shipped() -> Iterator[None]:
    """Let Bridge use the helper as it is where it cannot be compiled: wheels ship it compiled and have no Makefile.

    Elsewhere, as in a container with megatron-core's sources, Bridge compiles it as ever.
    """
    from megatron.bridge.training import initialize
    from megatron.core import datasets

    if any((Path(folder) / "Makefile").exists() for folder in datasets.__path__) or not _is_compiled():
        yield
        return
    with overridden(initialize, "compile_helpers", lambda: None):
        yield


def _is_compiled() -> bool:
    return find_spec("megatron.core.datasets.helpers_cpp") is not None
