"""Bridge's recipes, read from their files: importing them takes half a minute."""

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from bridge_cg_plugin.recipes import RECIPES
from bridge_cg_plugin.upstream.hooks.configuration.recipes import PACKAGES

from .answers import Tell

IMPL = "vision_cuda_graph_impl"


class RecipeFiles:
    """The files of the packages that hold recipes.

    Args:
        roots: Folders of the package `megatron`; None takes the installed one's.
    """

    def __init__(self, roots: Sequence[Path] | None = None) -> None:
        self._roots = _installed() if roots is None else roots

    def names(self) -> set[str]:
        """Return the names by which recipes are looked up: functions that the packages export."""
        found: set[str] = set()
        for package in PACKAGES:
            found |= set(self._exported(package))
            for child in self._children(package) if package != PACKAGES[0] else ():
                found |= set(self._exported(child))
        return {name for name in found if name.endswith("_config") and not name.startswith("_")}

    def with_upstreams_graphs(self) -> list[str]:
        """Return the recipes that switch upstream's own vision graphs on, themselves or in a function they call."""
        calls: dict[str, set[str]] = {}
        switching: set[str] = set()
        for found in map(_read, self._files()):
            switching |= found.switching
            for name, called in found.calls.items():
                calls.setdefault(name, set()).update(called)
            for alias in (alias for node in found.imports for alias in node.names):
                calls.setdefault(alias.asname or alias.name, set()).add(alias.name)
        while more := {name for name, others in calls.items() if others & switching} - switching:
            switching |= more
        return sorted(self.names() & switching)

    def _files(self) -> list[Path]:
        folders = [root.joinpath(*package.split(".")[1:]) for root in self._roots for package in PACKAGES]
        return [file for folder in folders for file in sorted(folder.rglob("*.py"))]

    def _children(self, package: str) -> Iterator[str]:
        for root in self._roots:
            for file in sorted(root.joinpath(*package.split(".")[1:]).glob("*/__init__.py")):
                yield f"{package}.{file.parent.name}"

    def _exported(self, module: str) -> dict[str, None]:
        """Return the functions of a module that `from module import *` takes."""
        file = self._file(module)
        if file is None:
            return {}
        found: dict[str, None] = {}
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        content = _read(file)
        for node in content.imports:
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                found.update(self._exported(origin) if alias.name == "*" else {alias.asname or alias.name: None})
        found.update(dict.fromkeys(content.functions))
        listed = content.listed
        return {name: None for name in found if name in listed} if listed else found

    def _file(self, module: str) -> Path | None:
        for root in self._roots:
            path = root.joinpath(*module.split(".")[1:])
            for file in (path / "__init__.py", path.with_suffix(".py")):
                if module.startswith(PACKAGES) and file.is_file():
                    return file
        return None


def _installed() -> list[Path]:
    found = importlib.util.find_spec("megatron")
    return [] if found is None else [Path(root) for root in found.submodule_search_locations or ()]


@dataclass(slots=True)
class _Content:
    """What a file of recipes has.

    Attributes:
        functions: Those of the module itself.
        imports: From other modules, wherever they stand.
        listed: Names in `__all__`.
        calls: By name of a function: what it calls.
        switching: Functions that set the option of vision graphs to something else than off.
    """

    functions: list[str]
    listed: set[str]
    imports: list[ast.ImportFrom] = field(default_factory=list)
    calls: dict[str, set[str]] = field(default_factory=dict)
    switching: set[str] = field(default_factory=set)


@cache
def _read(file: Path) -> _Content:
    """Read a file, once: its tree has thousands of nodes."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    found = _Content([node.name for node in tree.body if isinstance(node, ast.FunctionDef)], _listed(tree))
    for statement in tree.body:
        for node in (nodes := list(ast.walk(statement))):
            if isinstance(node, ast.ImportFrom):
                found.imports.append(node)
            elif isinstance(node, ast.FunctionDef):
                inside = nodes if node is statement else list(ast.walk(node))
                found.calls.setdefault(node.name, set()).update(_called(inside))
                found.switching |= {node.name} if IMPL in text and _switches_on(inside) else set()
    return found


def _listed(tree: ast.Module) -> set[str]:
    """Return the names in `__all__`; empty where there is none, or none that is written out."""
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id == "__all__"
    ]
    if any(not isinstance(value, ast.List | ast.Tuple) for value in values):
        return set()
    words = [node for value in values if value is not None for node in ast.walk(value)]
    return {node.value for node in words if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _called(nodes: Sequence[ast.AST]) -> set[str]:
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return {func.id if isinstance(func, ast.Name) else getattr(func, "attr", "") for func in calls}


def _switches_on(nodes: Sequence[ast.AST]) -> bool:
    """Whether a function's nodes set the option of vision graphs to something else than off."""
    for node in nodes:
        if isinstance(node, ast.Assign) and any(getattr(target, "attr", "") == IMPL for target in node.targets):
            value: ast.expr = node.value
        elif isinstance(node, ast.keyword) and node.arg == IMPL:
            value = node.value
        else:
            continue
        if not (isinstance(value, ast.Constant) and value.value in (None, "none")):
            return True
    return False


def run(part: str, as_json: bool, tell: Tell) -> int:
    """Print the names that contain a text; returns 2 if there are none, else 0.

    Args:
        part: The text, in any case and with any separators.
        as_json: Whether to print JSON.
        tell: Prints the answer.
    """
    presets, others = (_matching(part, names) for names in (RECIPES, recipes_of_bridge()))
    if not presets and not others:
        remedy = "Write another part of it; bridge-cg recipes lists all."
        print(f"Cannot find a recipe with {part!r} in its name. {remedy}", file=sys.stderr)
        return 2
    if as_json:
        tell(json.dumps({"presets": presets, "recipes": others}))
    else:
        tell("\n".join(["presets with graphs", *_indented(presets), "recipes of Megatron-Bridge", *_indented(others)]))
    return 0


def recipes_of_bridge() -> set[str]:
    """Return the names of the installed Bridge's recipes."""
    return RecipeFiles().names()


def _matching(part: str, names: Iterable[str]) -> list[str]:
    letters = _letters(part)
    return sorted(name for name in names if letters in _letters(name))


def _letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text).lower()


def _indented(names: Sequence[str]) -> list[str]:
    return [f"  {name}" for name in names] or ["  none"]
