"""The presets under one import path in a checkout and an editable install; test_distribution.py has the wheel."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGED = ("bridge_cg_plugin", "recipes", "pyproject.toml", "setup.py", "README.md", "LICENSE")
# Neither the virtual environment nor the current folder is on the path, so that nothing but `folder` can be found.
SCRIPT = """
import site, sys
site.addsitedir(sys.argv[1])
from bridge_cg_plugin.recipes import RECIPES, qwen3_vl_8b_vision_graphs_h200_sft_config as recipe
assert RECIPES[recipe.__name__] is recipe
import bridge_cg_plugin, bridge_cg_plugin.recipes
assert not {"torch", "megatron"} & set(sys.modules)
print(bridge_cg_plugin.__file__, bridge_cg_plugin.recipes.__file__, len(RECIPES))
"""


def python(*arguments, cwd):
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_from(folder, cwd):
    """Return the files of the package and of its presets as found in `folder` alone."""
    package, presets, count = python("-I", "-S", "-c", SCRIPT, folder, cwd=cwd).split()
    assert int(count) == 7
    return Path(package), Path(presets)


@pytest.fixture
def copy(tmp_path):
    """A copy of what a build reads, since builds write beside it."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in PACKAGED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


def unpacked(wheels, folder):
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
        return archive.namelist()


def test_a_checkout_on_the_path(tmp_path):
    package, presets = imported_from(ROOT, tmp_path)
    assert package.parents[1] == ROOT
    assert presets.resolve() == ROOT / "recipes" / "__init__.py"


def test_an_editable_install(copy, tmp_path):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    build = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    python("-c", build, wheels, cwd=copy)
    unpacked(wheels, site)
    package, presets = imported_from(site, tmp_path)
    assert package == copy / "bridge_cg_plugin" / "__init__.py"
    assert presets.resolve() == copy / "recipes" / "__init__.py"
