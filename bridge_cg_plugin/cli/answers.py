"""A command's answer alone on standard output, whatever libraries print."""

import ctypes
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import zip_longest

from bridge_cg_plugin.options.explain import GAP, cell_lines

Tell = Callable[[str], None]
STDOUT, STDERR = 1, 2
WIDTH = 80
# Of tables that go to a file or another program.
PIPED_WIDTH = 160


class AnswerError(Exception):
    """A command cannot read its input or write its answer; the message says why."""


@contextmanager
def answer_alone(lasting: bool = False) -> Iterator[Tell]:
    """Send to standard error what is printed inside the block, by Python or by C, and print the answer after it.

    An error inside the block leaves standard output empty.

    Args:
        lasting: Whether standard output stays closed to others after the answer, as libraries print while a process
            ends.

    Yields:
        A function that takes a line of the answer.
    """
    answer: list[str] = []
    sys.stdout.flush()
    kept = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        with redirect_stdout(sys.stderr):
            yield answer.append
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)  # what C still holds
        os.dup2(kept, STDOUT)
        os.close(kept)
    say(*answer)
    if lasting:
        os.dup2(STDERR, STDOUT)


def say(*lines: str) -> None:
    """Print lines; whoever reads them may stop early, as `head` does.

    Raises:
        AnswerError: They cannot be written, as to a full disk.
    """
    try:
        for line in lines:
            print(_coloured(line) if _has_colour() else line)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # or what it holds would be written as the process ends
        if not isinstance(error, BrokenPipeError):
            raise AnswerError(f"Cannot write to standard output: {error.strerror}.") from None


def _has_colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM", "dumb") != "dumb"


def _coloured(text: str) -> str:
    """Return text with what lines begin with in bold, and warnings in yellow."""
    label = re.compile(r"^( *[a-z][\w ]{0,24}:)(?= )", re.MULTILINE)
    return label.sub(lambda found: f"\033[{'33' if 'warning' in found[1] else '1'}m{found[1]}\033[0m", text)


def open_closed() -> None:
    """Have a standard output or error that the caller closed take what is written, and keep none of it."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # and its descriptor, the lowest that is free, is what `open` takes
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: figures to the right; the widest columns are narrowed to COLUMNS or the terminal.

    Args:
        rows: The header and what is below it.
    """
    columns = list(zip(*rows, strict=True))
    widths, most = [max(map(len, column)) for column in columns], width()
    least = [max(len(piece) for cell in column for piece in cell_lines(cell, 1)) for column in columns]
    while sum(widths) + len(GAP) * (len(widths) - 1) > most and widths > least:
        widths[max((size, i) for i, size in enumerate(widths) if size > least[i])[1]] -= 1
    figures = [not any(row[i][:1].isalpha() for row in rows[1:]) for i in range(len(widths))]
    lines = []
    for row in rows:
        cells = [cell_lines(cell, width) for cell, width in zip(row, widths, strict=True)]
        for texts in zip_longest(*cells, fillvalue=""):
            places = zip(texts, widths, figures, strict=True)
            lines.append(GAP.join(f"{text:{'>' if figure else '<'}{width}}" for text, width, figure in places).rstrip())
    return lines


def width() -> int:
    """Return the columns of COLUMNS or the terminal, or what a file or another program gets."""
    return shutil.get_terminal_size((WIDTH if sys.stdout.isatty() else PIPED_WIDTH, 0)).columns


def wrapped(*texts: str) -> list[str]:
    """Return lines of texts that fit into a terminal; what goes on is indented further than its text begins."""
    lines: list[str] = []
    wrapper = textwrap.TextWrapper(width(), break_long_words=False, break_on_hyphens=False)
    for text in texts:
        wrapper.subsequent_indent = " " * (len(text) - len(text.lstrip()) + 2)
        lines += wrapper.wrap(text) if len(text) > wrapper.width else [text]
    return lines
