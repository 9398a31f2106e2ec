"""What is installed: the source distribution, the wheel built from it, a checkout; what a package index shows."""

import email
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bridge_cg_plugin", "docs", "examples", "recipes", "requirements", "scripts", "tests")
FILES = {
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "MANIFEST.in", "mkdocs.yml"),
    *("pyproject.toml", "run", "setup.py"),
}
DATA = {
    *("bridge_cg_plugin/py.typed", "bridge_cg_plugin/upstream/seams/audited.json"),
    "bridge_cg_plugin/graphs/memory/allocator.c",
    "bridge_cg_plugin/cli/measured.json",
}
PRESET = "qwen3_vl_8b_vision_graphs_h200_sft_config"
# Where this process's PyTorch, Megatron and the rest are.
STACK = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
# Neither the virtual environment nor the current folder is on the path, so that nothing but the wheel can be found.
SCRIPT = """
import site, sys
site.addsitedir(sys.argv[1])
import bridge_cg_plugin.recipes
from bridge_cg_plugin.recipes import RECIPES, qwen3_vl_8b_vision_graphs_h200_sft_config as recipe
from bridge_cg_plugin.upstream.seams.states import combination_status
from bridge_cg_plugin.cli import checks, main
versions = {"megatron-bridge": "0.6.0", "megatron-core": "0.19.0", "transformer-engine": "2.15.0"}
print(len(RECIPES), combination_status(versions).state, bridge_cg_plugin.recipes.__file__)
assert RECIPES[recipe.__name__] is recipe
assert not {"torch", "megatron"} & set(sys.modules)
"""
# Beside the stack's folders, whose lines for the checkout stay unread.
EXPLAIN = f"""
import sys
sys.path += sys.argv[1:]
from bridge_cg_plugin.cli import main
sys.exit(main.main(["explain", "{PRESET}", "--json"]))
"""


def python(*arguments, cwd):
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind, source, folder):
    """Build in a folder of sources with the backend that is installed; returns the file."""
    folder.mkdir()
    script = f"import sys; from setuptools.build_meta import build_{kind} as build; build(sys.argv[1])"
    python("-c", script, folder, cwd=source)
    (made,) = folder.iterdir()
    return made


def presets_in(folder, cwd):
    """Return the file of the presets as found in a folder alone, whose package works."""
    presets, state, file = python("-I", "-S", "-c", SCRIPT, folder, cwd=cwd).split()
    assert (presets, state) == ("7", "audited")
    return Path(file)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the checkout, since builds write beside the sources."""
    copy = tmp_path_factory.mktemp("copy")
    for name in FOLDERS:
        # Other processes write bytecode meanwhile.
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        (copy / name / "__pycache__").mkdir()
        (copy / name / "__pycache__" / "stale.pyc").touch()
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def sdist(copy, tmp_path_factory):
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", copy, folder / "made")) as archive:
        archive.extractall(folder, filter="data")
    (unpacked,) = folder.glob("bridge_cg_plugin-*")
    return unpacked


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel that the source distribution makes."""
    return build("wheel", sdist, tmp_path_factory.mktemp("wheel") / "made")


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_string(archive.read(name).decode())


def sources():
    """Return the package's Python files, by their place in a wheel."""
    folders = {name: ROOT / name.rpartition("/")[2] for name in ("bridge_cg_plugin", "bridge_cg_plugin/recipes")}
    return {f"{name}/{path.relative_to(folder)}" for name, folder in folders.items() for path in folder.rglob("*.py")}


def test_the_source_distribution_is_the_checkout(sdist):
    names = {path.name for path in sdist.iterdir()}
    assert names - {"PKG-INFO", "setup.cfg", "bridge_cg_plugin.egg-info"} == {*FILES, *FOLDERS}
    files = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    assert {"docs/design.md", "requirements/stack.txt", "scripts/performance/run_recipe.py"} <= files
    assert not [name for name in files if name.endswith((".pyc", ".whl")) or "__pycache__" in name]
    assert sources() | DATA <= files


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entries,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        text = archive.read(entries).decode()
    assert names == sources() | DATA
    assert "bridge-cg = bridge_cg_plugin.cli.main:main" in text
    assert "[torch.backends]\nbridge_cg_plugin = bridge_cg_plugin.plugin:autoload" in text


def test_the_wheel_works_alone(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    assert presets_in(tmp_path, tmp_path) == tmp_path / "bridge_cg_plugin" / "recipes" / "__init__.py"
    explained = json.loads(python("-I", "-S", "-c", EXPLAIN, tmp_path, *STACK, cwd=tmp_path))
    assert explained["vision"]["impl"] != "none" and explained["nearest"]["gpu"]


def test_a_checkout_on_the_path_and_an_editable_install_have_the_presets(copy, tmp_path):
    assert presets_in(ROOT, tmp_path).resolve() == ROOT / "recipes" / "__init__.py"
    with zipfile.ZipFile(build("editable", copy, tmp_path / "made")) as archive:
        archive.extractall(tmp_path / "site")
    assert presets_in(tmp_path / "site", tmp_path).resolve() == copy / "recipes" / "__init__.py"


def test_the_version_is_in_the_changelog_and_a_container_gets_no_other_stack(metadata):
    assert re.fullmatch(r"\d+\.\d+\.\d+", metadata["Version"])
    assert f"## {metadata['Version']} " in (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in metadata.get_all("Requires-Dist") if "extra ==" not in name] == ["wrapt>=1.16"]


def test_the_page_of_an_index_has_no_dead_links(metadata):
    page = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)\"", text)
    assert all(link.startswith(("https://", "http://")) for found in links for link in found if link)
    assert "<!--" not in text and page.startswith("# bridge_cg_plugin")
    # Nothing but links, pictures and comments is lost.
    readme = (ROOT / "README.md").read_text()
    for block in re.findall(r"^```.*?^```$", readme, re.MULTILINE | re.DOTALL):
        assert block in page
    assert re.findall(r"^#+ .*$", readme, re.MULTILINE) == re.findall(r"^#+ .*$", page, re.MULTILINE)
