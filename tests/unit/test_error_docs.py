"""Errors and fallbacks: docs/trouble.md against the code, and the form of messages.

`python -m tests.unit.test_error_docs` writes the table of fallbacks.
"""

import ast
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.options import OptionError
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
    "TimeIsUp",
    "ProbeError",
    "SlowError",
    "OutOfSpace",
    "GraphError",
    "NotMeasured",
    "NoSourceError",
}


def calls(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "id", getattr(node.func, "attr", "")), node


def test_every_kind_of_error_is_on_the_page():
    kinds = {
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
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
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    named = {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "Fallback"}
    assert named == set(Fallback.__members__)
    package = [path for path in SOURCES if path.is_relative_to(ROOT / "bridge_cg_plugin") and path.stem != "fallback"]
    words = [n.value for path in package for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)]
    assert not {word for word in words if isinstance(word, str)} & set(Fallback)


if __name__ == "__main__":
    FILE.write_text(FALLBACKS.sub(lambda found: fallbacks(), PAGE))


def texts():
    """Yield every text in the code that people run and every line of the pages, with its place."""
    for folder in ("bridge_cg_plugin", "recipes", "scripts", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield from ((f"{path.relative_to(ROOT)}:{n}", line) for n, line in enumerate(path.read_text().splitlines(), 1))


def messages():
    """Yield every text of command lines in one piece, with its place, where values are put in as `{}`."""
    for folder in ("bridge_cg_plugin/cli", "scripts", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr | ast.Constant):
                    pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", "".join(map(piece_of, pieces))


def piece_of(node):
    return str(node.value) if isinstance(node, ast.Constant) else "{}"


def test_a_message_of_a_command_line_begins_with_what_cannot_be_done():
    said = [(place, text) for place, text in messages() if re.search(r"^(--|\{\}).*: (it|they) must ", text)]
    assert said == []


def test_what_argparse_writes_behind_a_flag_says_what_it_must_be():
    """argparse puts "argument --flag: " in front."""
    refused = [node for path in SOURCES for name, node in calls(path) if name == "ArgumentTypeError"]
    texts = ["".join(map(piece_of, getattr(node.args[0], "values", [node.args[0]]))) for node in refused]
    assert texts and [text for text in texts if not text.startswith("must be ")] == []


@given(st.text(max_size=20), st.one_of(st.none(), st.integers(), st.text(max_size=20)), st.text(max_size=20))
def test_an_error_of_an_option_begins_with_what_cannot_be_done(field, value, allowed):
    for error in (
        OptionError(field, value, allowed, "Do it."),
        OptionError.unknown(field, "option"),
        OptionError.unknown(field, "option", "other"),
    ):
        assert str(error).startswith("Cannot use ") and ": allowed" not in str(error).replace(allowed, "")
