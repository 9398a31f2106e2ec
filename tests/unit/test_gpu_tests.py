"""What CI can know of the tests that need a GPU: that they import what is there."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

MODULES = sorted(path.stem for path in (Path(__file__).parents[1] / "gpu").glob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_module_imports(name):
    importlib.import_module(f"tests.gpu.{name}")


@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_gpu_takes_other_modules_and_together_all(count):
    from tests.gpu.conftest import LONG, part_of

    items = [SimpleNamespace(path=Path(f"{name}.py"), number=n) for name in (*LONG, *MODULES) for n in range(2)]
    parts = [part_of(items, f"{number}/{count}") for number in range(count)]
    assert all(parts)
    assert sorted(map(id, items)) == sorted(id(item) for part in parts for item in part)
