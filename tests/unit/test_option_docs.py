"""docs/options.md against the code. `python -m tests.unit.test_option_docs` writes its tables."""

import re
from pathlib import Path

import pytest

from bridge_cg_plugin.options.explain import tables
from bridge_cg_plugin.options.sources import FIELDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"


# The page has these in a few words, because errors and warnings have the rest.
IN_PROSE = {"combinations", "inference", "migrations", "releases"}
TABLES = {name: table for name, table in tables().items() if name not in IN_PROSE}


def place(name):
    return re.compile(rf"(<!-- {name} -->\n)(.*?)(<!-- /{name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_the_codes(name):
    assert place(name).search(PAGE.read_text())[2].strip() == TABLES[name]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_on_the_page(field):
    assert f"`{field.rpartition('.')[2]}" in PAGE.read_text()


def write():
    """Write the tables into the page."""
    text = PAGE.read_text()
    for name, table in TABLES.items():
        text = place(name).sub(lambda found, table=table: f"{found[1]}{table}\n{found[3]}", text)
    PAGE.write_text(text)


if __name__ == "__main__":
    write()
