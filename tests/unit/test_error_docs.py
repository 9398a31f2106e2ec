"""Errors and fallbacks: docs/trouble.md against the code, and the form of messages.

`python -m tests.unit.test_error_docs` writes the table of fallbacks.
"""

import ast
import re
from functools import cache
from pathlib import Path

from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.options.explain import table

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "trouble.md"
PAGE = FILE.read_text()
SOURCES = [
    path
    for folder in ("bridge_cg_plugin", "scripts/performance", "recipes")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
FALLBACKS = re.compile(r"(?<=<!-- fallbacks -->\n).*?(?=<!-- /fallbacks -->)", re.DOTALL)
# Not for a user: a seam that does not fit becomes a state, the group's failure a fallback that names its cause.
INTERNAL = {
    "Overflow",
    "TimeIsUp",
    "ProbeError",
    "SlowError",
    "OutOfSpace",
    "GraphError",
    "NotComparable",
    "NotMeasured",
    "NoSourceError",
}


@cache
def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text())))


def test_every_kind_of_error_is_on_the_page():
    kinds = {
        node.name
        for path in SOURCES
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(b).endswith(("Error", "Exception")) for b in node.bases)
    }
    assert {"OptionError", "BatchError"} <= kinds
    assert {kind for kind in kinds - INTERNAL if f"`{kind}`" not in PAGE} == set()


def fallbacks():
    rows = [(f"`{reason}`", reason.meaning, reason.remedy) for reason in Fallback]
    return table(("reason", "meaning", "remedy"), rows) + "\n"


def test_the_table_of_fallbacks_is_the_enumerations():
    assert FALLBACKS.search(PAGE)[0] == fallbacks()


def test_every_reason_is_given_somewhere_and_none_by_its_word():
    """Whoever gives one names the member, so that there is no reason without a meaning and a remedy."""
    used = [node for path in SOURCES for node in nodes_of(path) if isinstance(node, ast.Attribute)]
    named = {node.attr for node in used if getattr(node.value, "id", "") == "Fallback"}
    assert named == set(Fallback.__members__)
    package = [path for path in SOURCES if path.is_relative_to(ROOT / "bridge_cg_plugin") and path.stem != "fallback"]
    words = [node.value for path in package for node in nodes_of(path) if isinstance(node, ast.Constant)]
    assert not {word for word in words if isinstance(word, str)} & set(Fallback)


if __name__ == "__main__":
    FILE.write_text(FALLBACKS.sub(lambda found: fallbacks(), PAGE))
