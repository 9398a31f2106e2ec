"""What is at a seam's place, read from upstream's sources: nothing is imported and nothing runs."""

import ast
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from .seam import Found, Seam

# (text, whether it is a package) of a module by its dotted name, None where there is none.
ReadModule = Callable[[str], tuple[str, bool] | None]
DEPTH = 12
# A base class from elsewhere adds nothing that a seam asks for.
OURS = ("megatron", "transformer_engine")


def from_folders(folders: Sequence[Path | zipfile.Path]) -> ReadModule:
    """Return a reader that looks in folders or archives, as Python looks in sys.path."""

    def read(module: str) -> tuple[str, bool] | None:
        base = module.replace(".", "/")
        for folder in folders:
            for path in (folder / f"{base}.py", folder / f"{base}/__init__.py"):
                if path.is_file():
                    return path.read_text(encoding="utf-8"), path.name == "__init__.py"
        return None

    return read


def installed(module: str) -> tuple[str, bool] | None:
    """Return the source of the module that this process has imported or would import."""
    path = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    if path.suffix == ".py" and path.is_file():
        return path.read_text(encoding="utf-8"), path.name == "__init__.py"
    return from_folders([Path(entry or ".") for entry in sys.path])(module)


class NoSourceError(LookupError):
    """What a seam names comes from a package whose source is not here."""


class SourceReader:
    """Finds targets in sources; each module is parsed once.

    Args:
        read: Gives a module's text.
    """

    def __init__(self, read: ReadModule = installed) -> None:
        self._read = read
        self._modules: dict[str, dict[str, Any] | None] = {}
        self._packages: dict[str, str] = {}  # what relative imports of a module are relative to
        self._own: dict[ast.ClassDef, frozenset[str]] = {}  # seams ask for the same classes, and those for their bases

    def has_module(self, module: str) -> bool:
        """Whether there is a source of the module."""
        return self._names(module) is not None

    def find(self, seam: Seam) -> Found | None:
        """Return what is at the seam's place, or where earlier releases have it, None if there is nothing.

        Raises:
            NoSourceError: It comes from elsewhere, or a base class does whose attributes matter.
        """
        if seam.kind == "module":
            return Found("module") if self.has_module(seam.module) else None
        candidates = (self._find(seam, target) for target in (seam.target, *seam.formerly))
        return next((found for found in candidates if found is not None), None)

    def _find(self, seam: Seam, target: str) -> Found | None:
        name, _, member = target.partition(".")
        place, node = self._resolve(seam.module, name)
        if node is None:
            return None
        if isinstance(node, ast.Constant):
            raise NoSourceError(f"no sources of {place} here")
        if not member:
            found = self._describe(place, node)
            if seam.attributes and found.kind == "class" and found.attributes is None:
                raise NoSourceError(f"no sources of a base class of {seam.place} here")
            return found
        if not isinstance(node, ast.ClassDef):
            return None
        if member == "__init__":
            return Found("function", self._constructor(place, node))
        if member == "__dataclass_fields__":
            return Found("value") if _is_dataclass(node) else None
        owner, method = self._method(place, node, member)
        return None if method is None else self._describe(owner, method)

    def _describe(self, module: str, node: ast.AST) -> Found:
        if isinstance(node, ast.ClassDef):
            return Found("class", self._constructor(module, node), self._attributes(module, node))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return Found("function", _parameters(node), None, ast.unparse(node))
        return Found("value")

    def _names(self, module: str) -> dict[str, Any] | None:
        if module not in self._modules:
            text, is_package = self._read(module) or (None, False)
            self._packages[module] = module if is_package else module.rpartition(".")[0]
            self._modules[module] = None if text is None else dict(_top_level(ast.parse(text).body))
        return self._modules[module]

    def _resolve(self, module: str, name: str, depth: int = DEPTH) -> tuple[str, ast.AST | None]:
        """Follow imports and plain renames to where a name is defined."""
        names = self._names(module)
        node = (names or {}).get(name)
        if depth == 0:
            return module, node
        if isinstance(node, tuple):  # (module, name) of a from-import
            source, name = resolve_name(node[0], self._packages[module]), node[1]
            if not self.has_module(source):
                return source, ast.Constant(None)  # exists, as far as one can tell without its source
            return self._resolve(source, name, depth - 1)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id != name:
            place, found = self._resolve(module, node.value.id, depth - 1)
            return (place, found) if found is not None else (module, node)
        return module, node

    def _bases(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef | None]]:
        """Yield (module, class) of every base; None for a base whose source is not here."""
        for base in node.bases:
            if isinstance(base, ast.Name):
                place, found = self._resolve(module, base.id)
                yield place, found if isinstance(found, ast.ClassDef) else None

    def _method(self, module: str, node: ast.ClassDef, name: str) -> tuple[str, ast.AST | None]:
        for statement in node.body:
            if getattr(statement, "name", None) == name:
                return module, statement
        inherited = (self._method(place, base, name) for place, base in self._bases(module, node) if base is not None)
        return next((found for found in inherited if found[1] is not None), (module, None))

    def _constructor(self, module: str, node: ast.ClassDef) -> tuple[str, ...] | None:
        owner, init = self._method(module, node, "__init__")
        if init is not None and not _is_dataclass(node):
            return _parameters(init)
        attributes = self._attributes(module, node)
        return tuple(sorted(attributes)) if attributes is not None and _is_dataclass(node) else None

    def _attributes(self, module: str, node: ast.ClassDef) -> frozenset[str] | None:
        """Return a class's fields, methods and what its methods set on `self`; None if a base cannot be read."""
        if node not in self._own:
            self._own[node] = frozenset(_own_attributes(node))
        found = set(self._own[node])
        for place, base in self._bases(module, node):
            inherited = self._attributes(place, base) if base is not None else frozenset()
            if inherited is None or (base is None and place.split(".")[0] in OURS):
                return None
            found |= inherited
        return frozenset(found)


def _top_level(body: list[ast.stmt]) -> Iterator[tuple[str, Any]]:
    """Yield what a body defines by name: the statement, or (module, name) of an import."""
    for statement in body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield statement.name, statement
        elif isinstance(statement, ast.ImportFrom):
            source = "." * statement.level + (statement.module or "")
            yield from ((alias.asname or alias.name, (source, alias.name)) for alias in statement.names)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from ((target.id, statement) for target in targets if isinstance(target, ast.Name))
        elif isinstance(statement, (ast.If, ast.Try, ast.With)):
            # What a handler or an else-branch defines is the stand-in: the first definition counts.
            parts = [getattr(statement, "orelse", []), *(h.body for h in getattr(statement, "handlers", []))]
            for part in (*parts, statement.body):
                yield from _top_level(part)


def _parameters(node: Any) -> tuple[str, ...]:
    arguments = node.args
    return tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _own_attributes(node: ast.ClassDef) -> Iterator[str]:
    yield from (name for name, _ in _top_level(node.body))
    for inner in ast.walk(node):
        if not isinstance(inner, ast.Attribute) or not isinstance(inner.ctx, ast.Store):
            continue
        if isinstance(inner.value, ast.Name) and inner.value.id == "self":
            yield inner.attr
