"""What CI can know of the tests that need a GPU: that they import what is there."""

import importlib
from pathlib import Path

import pytest

MODULES = sorted(path.stem for path in (Path(__file__).parents[1] / "gpu").glob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_module_imports(name):
    importlib.import_module(f"tests.gpu.{name}")
