"""Tables as plain text, whose cells are wrapped to the widths of their columns."""

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest

GAP = "  "
# Where names that are longer than a cell are divided.
_JOINTS = re.compile(r"(?<=[_.=,:/])")


def text_table(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Return the lines of a table; only a name without joints may be wider than its column."""
    return [line for row in rows for line in _lines(row, widths)]


def _lines(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    columns = [_cell(text, width) for text, width in zip(cells, widths, strict=True)]
    for texts in zip_longest(*columns, fillvalue=""):
        yield GAP.join(text.ljust(width) for text, width in zip(texts, widths, strict=True)).rstrip()


def _cell(text: str, width: int) -> list[str]:
    """Return the lines of a cell; names that do not fit into it are divided at their joints."""
    lines = [""]
    for word in text.split():
        pieces = [word] if len(word) <= width else _JOINTS.split(word)
        for number, piece in enumerate(pieces):
            gap = " " if lines[-1] and not number else ""
            if lines[-1] and len(lines[-1] + gap + piece) > width:
                lines.append("")
                gap = ""
            lines[-1] += gap + piece
    return lines
