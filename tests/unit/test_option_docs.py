"""docs/options.md against the code. `python -m tests.unit.test_option_docs` writes its tables."""

import re
from pathlib import Path

import pytest

from bridge_cg_plugin.options.declaration import plain
from bridge_cg_plugin.options.explain import table
from bridge_cg_plugin.options.graph_options import GROUPS
from bridge_cg_plugin.options.sources import FIELDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"


def group_table(group):
    """Return the table of a group's fields."""
    rows = [(f"`{one.field}`", *cells(one)) for one in group.options]
    return table(("field", "values", "default", "meaning"), rows)


def cells(one):
    """Return what an option's row has behind its name."""
    return one.allowed, f"`{plain(one.default)}`", f"{one.help}. {one.details}" if one.details else one.help


TABLES = {group.name: group_table(group) for group in GROUPS}


def place(name):
    return re.compile(rf"(<!-- {name} -->\n)(.*?)(<!-- /{name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_the_codes(name):
    assert place(name).search(PAGE.read_text())[2].strip() == TABLES[name], "run python -m tests.unit.test_option_docs"


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_on_the_page(field):
    assert f"`{field}" in PAGE.read_text()


def write():
    """Write the tables into the page."""
    text = PAGE.read_text()
    for name, written in TABLES.items():
        text = place(name).sub(lambda found, written=written: f"{found[1]}{written}\n{found[3]}", text)
    PAGE.write_text(text)


if __name__ == "__main__":
    write()
