"""A command's answer alone on standard output, whatever libraries print."""

import ctypes
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Tell = Callable[[str], None]
STDOUT, STDERR = 1, 2
WIDTH = 80
# Columns of tables that go to a file or another program; lines of a screen, which no table asks for.
PIPED_WIDTH, HEIGHT = 160, 25


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
        AnswerError: They cannot be written.
    """
    try:
        with named_failure():
            for line in lines:
                print(line)
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_held()


def answered(*lines: str) -> int:
    """Print an answer; returns the exit status: 2 where it cannot be written, else 0."""
    try:
        say(*lines)
    except AnswerError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


@contextmanager
def named_failure() -> Iterator[None]:
    """Name what standard output fails with inside the block, such as a full disk.

    Raises:
        AnswerError: It failed, not because its reader has gone.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_held()
        raise AnswerError(f"Cannot write to standard output: {error.strerror}.") from None


def _drop_held() -> None:
    """Lose what standard output still holds, which would be written once more as the process ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDOUT)
    os.close(nowhere)


def open_closed() -> None:
    """Have a standard output or error that the caller closed take what is written, and keep none of it."""
    for descriptor, name in ((STDOUT, "stdout"), (STDERR, "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(descriptor, "w"))


def table_console() -> "Console":
    """Return what prints tables: as wide as COLUMNS is, else as the terminal, else `PIPED_WIDTH`.

    Raises:
        ImportError: rich is not installed.
    """
    from rich.console import Console

    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        width = int(columns)
    elif sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    else:
        width = PIPED_WIDTH
    return Console(width=width, height=HEIGHT)  # with both, rich takes no TERM=dumb for 80 columns


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
