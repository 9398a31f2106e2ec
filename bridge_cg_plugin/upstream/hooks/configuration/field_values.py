"""Whether a value on a command line has the type of the field that it sets, by the field's annotation."""

import ast
import re
from collections.abc import Callable
from typing import Any

from ....options import OptionError


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_PLAIN: dict[str, tuple[str, Callable[[str], bool]]] = {
    "bool": ("true or false", lambda text: text.lower() in ("true", "false", "0", "1")),
    "int": ("a whole number", lambda text: re.fullmatch(r"[+-]?\d+(_\d+)*", text) is not None),
    "float": ("a number", _is_number),
}
# A type of `_PLAIN`, or a value of a `Literal` as it is written.
Accepted = frozenset[str]


def check_value(name: str, annotation: Any, held: Any, text: str) -> None:
    """Refuse a value of another type than the field's, which Hydra would set all the same.

    A field is checked if its annotation has numbers, booleans and literals only. Upstream's annotations are not always
    right: a value of the type that the field holds is accepted too.

    Args:
        name: The field's name on the command line.
        annotation: Its type, or the text of it.
        held: The value that it has.
        text: The value on the command line.

    Raises:
        OptionError: The value cannot be of such a type.
    """
    accepted = accepted_by(annotation)
    plain = held is None or type(held).__name__ in _PLAIN or (isinstance(held, str) and repr(held) in (accepted or ()))
    if accepted is None or not plain or text == "null" or "${" in text:
        return
    if held is not None:
        accepted |= {type(held).__name__} & _PLAIN.keys()
    if not any(_fits(text.strip(), kind) for kind in accepted):
        allowed = " or ".join(_PLAIN[kind][0] if kind in _PLAIN else kind for kind in sorted(accepted))
        raise OptionError(name, text, allowed, "Correct the value.")


def accepted_by(annotation: Any) -> Accepted | None:
    """Return what an annotation accepts besides None; None if it accepts text, or more than can be told here."""
    text = annotation if isinstance(annotation, str) else repr(annotation)
    if isinstance(annotation, type) and annotation.__module__ == "builtins":
        text = annotation.__name__ if annotation.__name__ in _PLAIN else ""
    try:
        return _read(ast.parse(text.strip(), mode="eval").body)
    except SyntaxError:
        return None


def _read(node: ast.expr) -> Accepted | None:
    match node:
        case ast.Name("bool" | "int" | "float" as kind):
            return frozenset({kind})
        case ast.Name("None" | "NoneType") | ast.Constant(None):
            return frozenset()
        case ast.BinOp(left, ast.BitOr(), right):
            return _together(left, right)
        case ast.Subscript(origin, inside):
            parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
            return _of_parts(ast.unparse(origin).rpartition(".")[2], parts)
    return None


def _of_parts(origin: str, parts: list[ast.expr]) -> Accepted | None:
    if origin in ("Optional", "Union"):
        return _together(*parts)
    if origin == "Literal" and all(isinstance(part, ast.Constant) for part in parts):
        return frozenset(ast.unparse(part) for part in parts)
    return None


def _together(*parts: ast.expr) -> Accepted | None:
    found = [_read(part) for part in parts]
    known = [part for part in found if part is not None]
    return frozenset().union(*known) if len(known) == len(found) else None


def _fits(text: str, kind: str) -> bool:
    if kind in _PLAIN:
        return _PLAIN[kind][1](text)
    return text.strip("'\"") == kind.strip("'\"")
