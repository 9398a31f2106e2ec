"""The flags of docs/recipes.md against `--help`. `python -m tests.unit.test_run_recipe_docs` writes their table."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from bridge_cg_plugin.cli.runs import train as run_recipe
from bridge_cg_plugin.cli.runs.recipe_arguments import build_parser
from bridge_cg_plugin.options.explain import table
from bridge_cg_plugin.options.flags import FLAGS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
PLACE = re.compile(r"(<!-- flags -->\n)(.*?)(<!-- /flags -->)", re.DOTALL)
WIDE = {"COLUMNS": "400"}
# docs/options.md has the options.
OPTIONS = {f"`{spelling}`" for flag in FLAGS for spelling in flag.spellings}


@pytest.fixture
def help_text(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    return said()


def said():
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        run_recipe.main(["--help"])
    return out.getvalue()


def rows(text):
    """Return (spellings, value, meaning) of every flag that a help text lists."""
    found = []
    for line in text.splitlines():
        match = re.fullmatch(r"  (-\S.*?)(?:\s{2,}(\S.*))?", line)
        if match is None and found and line.startswith(" " * 10) and line.strip():
            found[-1] = (*found[-1][:2], f"{found[-1][2]} {line.strip()}".strip())
        if match is not None:
            parts = [part.partition(" ") for part in re.split(r", (?=-)", match[1])]
            found.append((", ".join(f"`{name}`" for name, _, _ in parts), parts[-1][2], match[2] or ""))
    return found


def flags_table(text):
    """Return the table of the flags that are no graph options."""
    own = [row for row in rows(text) if not OPTIONS & set(row[0].split(", "))]
    cells = [(names, f"`{value}`" if value else "", meaning) for names, value, meaning in own]
    return table(("flag", "value", "meaning"), cells)


def test_the_table_is_the_help(help_text):
    assert PLACE.search(PAGE.read_text())[2].strip() == flags_table(help_text)


def test_every_flag_of_the_parser_is_read_from_the_help(help_text):
    known = [option for action in build_parser()._actions for option in action.option_strings]
    assert re.findall(r"`(-[\w-]+)`", " ".join(names for names, _, _ in rows(help_text))) == known
    assert {f"`{option}`" for option in known} >= OPTIONS


def write():
    """Write the table into the page."""
    import os

    os.environ.update(WIDE)
    PAGE.write_text(PLACE.sub(lambda found: f"{found[1]}{flags_table(said())}\n{found[3]}", PAGE.read_text()))


if __name__ == "__main__":
    write()
