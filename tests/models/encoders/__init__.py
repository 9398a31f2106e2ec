"""The encoders that graphs know beside Qwen3-VL's, full size on a GPU: a module for each."""

import importlib
import pkgutil

from tests.models.encoder_case import Encoder


def _case(name: str) -> Encoder:
    found: Encoder = importlib.import_module(f"{__name__}.{name}").ENCODER
    return found


ENCODERS = {name: _case(name) for name in sorted(module.name for module in pkgutil.iter_modules(__path__))}
