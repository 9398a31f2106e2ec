"""docs/errors.md against the code: every refused option, kind of error, and message of the planner and the audit."""

import ast
import importlib
from pathlib import Path

import pytest

import bridge_cg_plugin

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
SOURCES = [
    path
    for folder in ("bridge_cg_plugin", "scripts/performance", "recipes")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
# Refused are their arguments, by the caller's name for them.
INDIRECT = {"field", "name", "longest_field", "on[0]", "str(error.argument_name)", "match['name']", "fields[option]"}
IN_FULL = ("PlanError", "AuditError")
# Not for a user: a seam that does not fit becomes a state, the group's failure a fallback that names its cause.
INTERNAL = {"TimeIsUp", "OutOfSpace", "GraphError", "NoSourceError", "DriftError", "ReplayError"}


def calls(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "id", getattr(node.func, "attr", "")), node


def refused():
    """Yield the place and the name of every option that a line of code refuses."""
    for path in SOURCES:
        for name, node in calls(path):
            if name != "OptionError" or not node.args or ast.unparse(node.args[0]) in INDIRECT:
                continue
            yield path, node.lineno, node.args[0]


def value_of(path, node):
    if isinstance(node, ast.Constant):
        return node.value
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    return eval(ast.unparse(node), vars(module))


def test_every_option_that_is_refused_is_on_the_page():
    bridge_cg_plugin.activate()
    found = {(str(path.relative_to(ROOT)), line): value_of(path, node) for path, line, node in refused()}
    assert len(found) > 50
    missing = {place: option for place, option in found.items() if not is_named(option)}
    assert missing == {}


def is_named(option):
    return any(f"`{name}`" in PAGE for name in (option, option.removeprefix("model."), f"model.{option}"))


def test_every_kind_of_error_is_on_the_page():
    kinds = {
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(b).endswith(("Error", "Exception")) for b in node.bases)
    }
    assert {"OptionError", "BatchError"} <= kinds
    assert {kind for kind in kinds - INTERNAL - set(IN_FULL) if kind not in PAGE} == set()


def fragment(node):
    """Return the longest piece of a message that is the same whatever it is about."""
    (message,) = node.args
    pieces = message.values if isinstance(message, ast.JoinedStr) else [message]
    return max((piece.value for piece in pieces if isinstance(piece, ast.Constant)), key=len, default="").strip(" :")


MESSAGES = sorted({fragment(node) for path in SOURCES for name, node in calls(path) if name in IN_FULL})


def test_messages_are_found_at_all():
    assert len(MESSAGES) > 25


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_of_the_planner_and_the_audit_is_on_the_page(message):
    assert message in PAGE
