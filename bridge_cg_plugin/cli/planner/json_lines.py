"""Rows of a JSON Lines file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def json_lines(path: Path) -> Iterator[Any]:
    """Yield the rows; blank lines are none. Text in a row may hold separators of lines that are not JSON's.

    Raises:
        ValueError: A row is no JSON; has its number.
    """
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    for number, line in enumerate(line for line in lines if line.strip()):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"row {number}: {error.msg}") from None
