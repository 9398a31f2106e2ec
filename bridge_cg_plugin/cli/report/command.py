"""The command `bridge-cg report`."""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from bridge_cg_plugin.options import OptionError

from ..answers import Tell, named_failure, say, table_console
from .page import Page, make_page
from .records import read_runs
from .render import to_json, to_markdown, to_terminal


def add_arguments(parser: ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN|MODE=RUN",
        help="a .jsonl of records, a folder with TensorBoard event files or records, or a log of Bridge's training "
        "loop; MODE names it: eager1, eager2, ... are what the others are compared with",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page as Markdown")
    parser.add_argument("--title", help="title of the page")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        metavar="X",
        help="dense bf16 TFLOP/s of one GPU, for FLOP utilization of runs that do not name theirs",
    )


def run_report(args: Namespace, tell: Tell) -> int:
    """Write what was asked for and print the page by `tell`; returns 2 for input that is refused, else 0."""
    try:
        if args.peak_tflops is not None and not args.peak_tflops > 0:
            why = "it must be a number above 0. An H100 or H200 has 989.4."
            raise OptionError.because("peak-tflops", f"Cannot use --peak-tflops {args.peak_tflops:g}: {why}")
        page = make_page(read_runs(args.runs, args.peak_tflops), args.title or ", ".join(map(_name, args.runs)))
        write_page(page, markdown=args.markdown)
        if args.json:
            tell(to_json(page).removesuffix("\n"))
        else:
            print_page(page, tell)
    except OptionError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def print_page(page: Page, tell: Tell = say) -> None:
    """Print a page to the terminal by `tell`.

    Raises:
        OptionError: rich is not installed.
        AnswerError: Standard output does not take it.
    """
    try:
        console = table_console()
    except ModuleNotFoundError as error:
        why = f"rich is not installed ({error}). Install it (pip install rich), or pass --json."
        raise OptionError.because("json", why) from None
    with named_failure(), console.capture() as shown:  # which ends with a write of nothing
        to_terminal(page, console)
    tell(shown.get().removesuffix("\n"))


def write_page(page: Page, markdown: Path | None = None, json: Path | None = None) -> None:
    """Write a page's files.

    Raises:
        OptionError: A file cannot be written.
    """
    texts = {markdown: to_markdown(page)} if markdown is not None else {}
    texts |= {json: to_json(page)} if json is not None else {}
    for path, text in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            named = text.encode(errors="surrogateescape").decode(errors="replace")  # of files with names of any bytes
            path.write_text(named, encoding="utf-8")
        except OSError as error:
            raise OptionError.because("file", f"Cannot write {path}: {error.strerror}.") from None


def _name(word: str) -> str:
    return Path(word.rpartition("=")[2] or word).name
