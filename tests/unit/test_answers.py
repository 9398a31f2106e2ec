"""What commands print: colour where there is a terminal, widths of tables."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.cli.answers import say, table


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("out", "variables", "coloured"),
    [
        (Terminal, {"TERM": "xterm"}, True),
        (Terminal, {"TERM": "dumb"}, False),
        (Terminal, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (io.StringIO, {"TERM": "xterm"}, False),
    ],
)
def test_colour_where_the_terminal_has_it(monkeypatch, out, variables, coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", out())
    say("time a step: 5 ms\nwarning: slow", '{"a": 1}')
    bold, yellow = "\033[1mtime a step:\033[0m 5 ms", "\033[33mwarning:\033[0m slow"
    plain = "time a step: 5 ms\nwarning: slow"
    said = f"{bold}\n{yellow}" if coloured else plain
    assert sys.stdout.getvalue() == f'{said}\n{{"a": 1}}\n'


words = st.lists(st.text("abc_", min_size=1, max_size=9), min_size=1, max_size=6).map(" ".join)


@given(st.integers(1, 6).flatmap(lambda n: st.lists(st.lists(words, min_size=n, max_size=n), min_size=2, max_size=5)))
def test_a_table_is_no_wider_than_the_terminal(rows):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", "80")
        lines = table(rows)
    assert max(map(len, lines)) <= 80
    assert "".join("".join(lines).split()) != ""
    for word in {piece for row in rows for cell in row for piece in cell.replace("_", "_ ").split()}:
        assert any(word in line for line in lines)
