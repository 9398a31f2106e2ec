"""The command `bridge-cg report`, and its page of training runs: in a terminal, as Markdown and as JSON."""

import json
import math
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bridge_cg_plugin.cli.answers import Tell, table, wrapped
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.options.explain import table as markdown_table

from .runs import WARM_UP, Run, Verdict, verdicts
from .sources import read_runs

Row = tuple[str, ...]
STATES = {"same": "SAME", "different": "DIFFERENT", "unknown": "NO VERDICT"}


class Table(NamedTuple):
    """A table, without the columns that no row has anything in."""

    title: str
    header: Row
    rows: tuple[Row, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A page.

    Attributes:
        title: Its title.
        origins: Where the runs come from, a line each.
        runs: The runs.
        verdicts: Of all runs that are not eager.
        tables: Its tables, in order.
    """

    title: str
    origins: tuple[str, ...]
    runs: tuple[Run, ...]
    verdicts: tuple[Verdict, ...]
    tables: tuple[Table, ...]


def make_page(runs: Sequence[Run], title: str = "Training runs") -> Page:
    """Return the page of these runs."""
    origins = (", ".join(filter(None, (r.gpu, r.date, *map(" ".join, r.versions.items())))) for r in runs)
    return Page(title, tuple(dict.fromkeys(filter(None, origins))), tuple(runs), tuple(verdicts(runs)), tables(runs))


def label(run: Run | Verdict, runs: Sequence[Run]) -> str:
    """Return a run's name: its mode, with its case where there are several."""
    return run.mode if len({r.case for r in runs}) == 1 else f"{run.case}: {run.mode}"


def tables(runs: Sequence[Run]) -> tuple[Table, ...]:
    """Return what runs did, beside each other."""
    trained = [run for run in runs if not run.error]
    times = [(run, _times(run, runs)) for run in runs]
    throughput = [
        *(("samples/s", ".2f", "samples_per_s"), ("tokens/s", ",.0f", "tokens_per_s")),
        *(("TFLOP/s per GPU", ".1f", "tflops_per_gpu"), ("peak GiB", ".1f", "peak_gb")),
    ]
    rates = [(run, tuple(_f(getattr(run, name), form) for _, form, name in throughput)) for run in trained]
    steps = sorted({step for run in runs for step, _ in run.losses})
    some = sorted({steps[round(i * (len(steps) - 1) / 5)] for i in range(6)}) if steps else []
    losses = [(run, tuple(_f(dict(run.losses).get(step), ".5g") for step in some)) for run in runs]
    graphs = [
        (
            run,
            (
                *(kind, str(counts.replays), f"{counts.replayed_share:.1%}", _f(counts.padding_share, ".1%")),
                *(_f(counts.capture_s), _f(counts.memory_gb), _f(counts.warmup_microbatches, "d")),
                ", ".join(f"{reason} {n}" for reason, n in sorted(counts.fallbacks.items())) or "none",
            ),
        )
        for run in runs
        for kind, counts in run.graphs.items()
    ]
    found: tuple[tuple[str, Row, Sequence[tuple[Run, Row]], str], ...] = (
        (
            "Step time",
            ("median ms", "over eager", "fastest ms", "90 % below ms", "slowest ms", "steps", "note"),
            times,
            f"Without the first {WARM_UP} steps: warm-up, capture and the first replays are among them.",
        ),
        (
            "Throughput and memory",
            tuple(name for name, *_ in throughput),
            rates,
            "All GPUs together, where nothing else is said. Tokens are the language model's, padding included.",
        ),
        ("Losses", tuple(f"step {step}" for step in some), losses, ""),
        (
            "Graphs",
            ("graphs", "replays", "share", "padding", "capture s", "GiB", "warm-up", "fallbacks"),
            graphs,
            "Warm-up counts eager microbatches before capture.",
        ),
    )
    return tuple(made for each in found if (made := _table(runs, *each)).rows)


def _table(runs: Sequence[Run], title: str, header: Row, rows: Sequence[tuple[Run, Row]], note: str) -> Table:
    rows = [(run, row) for run, row in rows if any(row)]
    kept = [i for i in range(len(header)) if any(row[i] for _, row in rows)]
    cells = tuple((label(run, runs), *(row[i] for i in kept)) for run, row in rows)
    return Table(title, ("run", *(header[i] for i in kept)), cells, note)


def _times(run: Run, runs: Sequence[Run]) -> Row:
    """Return times of a run's steps, over the fastest median of its case's eager runs."""
    if run.error:
        return (*[""] * 6, f"failed: {run.error}")
    if run.median_ms is None:
        return ("",) * 7
    eager = [e.median_ms for e in runs if e.is_eager and e.case == run.case and e.median_ms and not e.error]
    notes = "; ".join(filter(None, (run.wrong, "warm-up included" if run.times and not run.settled_ms else "")))
    times = sorted(run.settled_ms)
    ninety = statistics.quantiles(times, n=10, method="inclusive")[-1] if len(times) > 1 else max(times, default=0)
    spread = (_f(times[0]), _f(ninety), _f(times[-1]), str(len(times))) if times else ("",) * 4
    return (_f(run.median_ms), f"{run.median_ms / min(eager):.2f}" if eager else "", *spread, notes)


def _f(value: float | None, form: str = ".1f") -> str:
    return "" if value is None else format(value, form)


def _said(page: Page, mark: str = "") -> list[str]:
    """Return the verdicts as sentences."""
    return [f"{mark}{STATES[v.state]}{mark} {label(v, page.runs)}: {v.reason}" for v in page.verdicts]


def to_terminal(page: Page) -> str:
    """Return a page as lines for a terminal."""
    lines = wrapped(page.title, *page.origins)
    for shown in page.tables:
        lines += ["", shown.title, *table([shown.header, *shown.rows]), *(wrapped(shown.note) if shown.note else [])]
    said = wrapped(*_said(page))
    return "\n".join([*lines, *([""] if said else []), *said])


def to_markdown(page: Page) -> str:
    """Return a page as Markdown."""
    parts = [f"# {page.title}", *page.origins]
    if page.verdicts:
        parts += ["## Parity with eager", "\n".join(f"* {line}" for line in _said(page, "**"))]
    for shown in page.tables:
        rows = [tuple(cell.replace("|", "\\|") for cell in row) for row in shown.rows]
        parts += [f"## {shown.title}", markdown_table(shown.header, rows), *filter(None, [shown.note])]
    return "\n\n".join(parts) + "\n"


def to_json(page: Page) -> str:
    """Return a page as one JSON object: runs as they were read, verdicts, tables. What is no number is null."""
    found = {
        **asdict(page),
        "runs": [{**asdict(run), "median_ms": run.median_ms} for run in page.runs],
        "tables": [shown._asdict() for shown in page.tables],
    }
    return json.dumps(_finite(found), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def write(path: Path, text: str) -> None:
    """Write a page's file.

    Raises:
        OptionError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        named = text.encode(errors="surrogateescape").decode(errors="replace")  # names have any bytes
        path.write_text(named, encoding="utf-8")
    except OSError as error:
        raise OptionError.because("file", f"Cannot write {path}: {error.strerror}.") from None


def add_arguments(parser: ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN|MODE=RUN",
        help="a .jsonl of records, a folder of them, or a log of Bridge's training loop; MODE names it: eager1, "
        "eager2, ... are what the others are compared with",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page as Markdown")


def run_report(args: Namespace, tell: Tell) -> int:
    """Write what was asked for and print the page by `tell`; returns the exit status."""
    names = [Path(word.rpartition("=")[2] or word).name for word in args.runs]
    page = make_page(read_runs(args.runs), ", ".join(names))
    if args.markdown is not None:
        write(args.markdown, to_markdown(page))
    tell(to_json(page) if args.json else to_terminal(page))
    return 0
