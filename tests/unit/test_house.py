"""The drawing of the house in docs/design.md against the imports of the code."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "bridge_cg_plugin"
UPSTREAM = ("megatron", "transformer_engine")
PAGE = (ROOT / "docs/design.md").read_text()


def layers():
    """Return the rooms of each layer of the drawing, by their dotted names, from the top down."""
    text = re.search(r"<!-- not run: a drawing of the house -->\n```text\n(.*?)```", PAGE, re.DOTALL)[1]
    rooms = [re.split(r"\s{2,}", line)[0].split(", ") for line in text.splitlines() if not line.startswith(" ")]
    return [[f"{PACKAGE}.{name.replace('/', '.')}" for name in row] for row in rooms]


CLI = f"{PACKAGE}.cli"
LAYERS = layers()
LEVELS = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


@functools.cache
def modules():
    """Return the file of every module by its dotted name."""
    found = {}
    for path in (ROOT / PACKAGE).rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[: -1 if parts[-1] == "__init__" else None])] = path
    return found


@functools.cache
def imported(name):
    """Return the dotted names that a module imports, wherever in it."""
    return set(_imported(name))


def _imported(name):
    path = modules()[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                yield f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in modules() else origin


@functools.cache
def ours():
    """Return the modules of the package that each module imports."""
    return {name: {other for other in imported(name) if other in modules()} - {name} for name in modules()}


def room_of(name):
    """Return the innermost room that is drawn, None for one that is not."""
    rooms = [room for room in LEVELS if name == room or name.startswith(room + ".")]
    return max(rooms, key=len, default=None)


def test_every_module_has_a_room_and_every_room_a_module():
    named = {name: room_of(name) for name in modules() if name != PACKAGE}
    assert [name for name, room in named.items() if room is None] == []
    assert set(named.values()) == set(LEVELS)


@pytest.mark.parametrize("room", LEVELS)
def test_a_room_imports_from_lower_layers_only(room):
    public = {"bridge_cg_plugin"} if room.startswith("bridge_cg_plugin.cli") else set()
    upwards = {
        (name, other)
        for name, others in ours().items()
        if room_of(name) == room
        for other in others - public
        if room_of(other) != room and (room_of(other) is None or LEVELS[room_of(other)] <= LEVELS[room])
    }
    assert upwards == set()


def test_no_modules_import_each_other():
    order = graphlib.TopologicalSorter({name: others - {"bridge_cg_plugin"} for name, others in ours().items()})
    assert len(list(order.static_order())) >= len(modules()) - 1


def test_the_plugin_never_imports_its_commands_and_scripts():
    importers = [name for name, others in ours().items() if any(o.startswith(CLI) for o in others)]
    assert importers and all(name.startswith(CLI) for name in importers)
    assert [name for name in modules() if any(other.split(".")[0] == "scripts" for other in imported(name))] == []


def test_upstreams_names_are_in_upstream_only():
    importers = {name for name in modules() if any(other.split(".")[0] in UPSTREAM for other in imported(name))}
    others = importers - {f"{CLI}.runs.recorder"}  # a callback of Bridge's trainer
    assert others < importers and all(name.startswith(f"{PACKAGE}.upstream.") for name in others)
