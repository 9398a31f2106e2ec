"""A command's answer alone on standard output, whatever libraries print."""

import ctypes
import os
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
# What a narrow terminal leaves of a column at least.
LEAST = 12


class AnswerError(Exception):
    """Standard output does not take the answer."""


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
        _flush()
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
            print(line)
        sys.stdout.flush()
    except OSError as error:
        _replace(STDOUT)  # or what it holds would be written once more as the process ends
        if not isinstance(error, BrokenPipeError):
            raise AnswerError(f"Cannot write to standard output: {error.strerror}.") from None


def answered(*lines: str) -> int:
    """Print an answer; returns the exit status: 2 where it cannot be written, else 0."""
    try:
        say(*lines)
    except AnswerError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _replace(descriptor: int) -> None:
    """Have a descriptor lose what is written to it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != descriptor:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def open_closed() -> None:
    """Have a standard output or error that the caller closed take what is written, and keep none of it."""
    for descriptor, name in ((STDOUT, "stdout"), (STDERR, "stderr")):
        if getattr(sys, name) is None:
            _replace(descriptor)
            setattr(sys, name, os.fdopen(descriptor, "w"))


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: figures to the right; the widest columns are narrowed to the terminal's width.

    Args:
        rows: The header and what is below it.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + len(GAP) * (len(widths) - 1) > _columns() and max(widths) > LEAST:
        widths[widths.index(max(widths))] -= 1
    figures = [not any(row[i][:1].isalpha() for row in rows[1:]) for i in range(len(widths))]
    lines = []
    for row in rows:
        cells = [cell_lines(cell, width) for cell, width in zip(row, widths, strict=True)]
        for texts in zip_longest(*cells, fillvalue=""):
            places = zip(texts, widths, figures, strict=True)
            lines.append(GAP.join(f"{text:{'>' if figure else '<'}{width}}" for text, width, figure in places).rstrip())
    return lines


def _columns() -> int:
    """Return how wide tables may be: as COLUMNS is, else as the terminal, else `PIPED_WIDTH`."""
    return shutil.get_terminal_size((WIDTH if sys.stdout.isatty() else PIPED_WIDTH, 0)).columns


def wrapped(text: str) -> list[str]:
    """Return lines that fit into a terminal; what goes on is indented further than the text begins."""
    if len(text) <= WIDTH:
        return [text]
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _flush() -> None:
    """Write out what Python and C still hold for standard output."""
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)


def between(ratios: tuple[float, float]) -> str:
    """Return a least and a greatest ratio as text, one where they are alike."""
    least, greatest = (f"{ratio:.2f}" for ratio in ratios)
    return least if least == greatest else f"{least}-{greatest}"
