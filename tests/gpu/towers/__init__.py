"""The models of `tests.gpu.tower_training`, small language models around encoders of full width: a module for each."""

import importlib
import pkgutil

from tests.gpu.tower_case import Tower


def _tower(name: str) -> Tower:
    found: Tower = importlib.import_module(f"{__name__}.{name}").TOWER
    return found


TOWERS = {name: _tower(name) for name in sorted(module.name for module in pkgutil.iter_modules(__path__))}
