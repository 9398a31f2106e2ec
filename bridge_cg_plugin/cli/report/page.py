"""The command `bridge-cg report`, and its page of training runs: in a terminal, as Markdown and as JSON."""

import json
import math
import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.answers import Tell, table, wrapped
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.options.explain import table as markdown_table

from .runs import WARM_UP, GraphCounts, Run, Verdict, verdicts
from .sources import read_runs

Row = tuple[str, ...]
STATES = {"same": "SAME", "different": "DIFFERENT", "unknown": "NO VERDICT"}


@dataclass(frozen=True, slots=True)
class Table:
    """A table; cells are text, those of the first `names` columns are names and the others figures."""

    title: str
    header: Row
    rows: tuple[Row, ...]
    names: int = 1
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

    @property
    def said(self) -> list[str]:
        """The verdicts as sentences."""
        return [f"{STATES[v.state]} {label(v, self.runs)}: {v.reason}" for v in self.verdicts]


def make_page(runs: Sequence[Run], title: str = "Training runs") -> Page:
    """Return the page of these runs."""
    tables = (_step_times(runs), _throughput(runs), _losses(runs), _graphs(runs), *_buckets(runs))
    return Page(
        title,
        tuple(dict.fromkeys(filter(None, map(_origin, runs)))),
        tuple(runs),
        tuple(verdicts(runs)),
        tuple(table for table in tables if table.rows),
    )


def _origin(run: Run) -> str:
    versions = [f"{name} {version}" for name, version in run.versions.items()]
    return ", ".join(filter(None, (run.gpu, run.date, *versions)))


def label(run: Run | Verdict, runs: Sequence[Run]) -> str:
    """Return a run's name: its mode, with its case where there are several."""
    return run.mode if len({r.case for r in runs}) == 1 else f"{run.case}: {run.mode}"


def _eager_ms(run: Run, runs: Iterable[Run]) -> float | None:
    """Return the fastest median of a case's eager runs in milliseconds."""
    found = [e.median_ms for e in runs if e.is_eager and e.case == run.case and e.median_ms and not e.error]
    return min(found, default=None)


def _step_times(runs: Sequence[Run]) -> Table:
    rows = []
    for run in runs:
        if run.error:
            rows.append((label(run, runs), *[""] * 6, f"failed: {run.error}"))
        elif run.median_ms is not None:
            base = _eager_ms(run, runs)
            ratio = f"{run.median_ms / base:.2f}" if base else ""
            few = "warm-up included" if run.times and not run.settled_ms else ""
            notes = "; ".join(filter(None, (run.wrong, few)))
            rows.append((label(run, runs), _f(run.median_ms), ratio, *_spread_of(run), notes))
    header = ("run", "median ms", "over eager", "fastest ms", "90 % below ms", "slowest ms", "steps", "note")
    note = f"Without the first {WARM_UP} steps: warm-up, capture and the first replays are among them."
    return _cut("Step time", header, rows, note)


def _spread_of(run: Run) -> Row:
    times = sorted(run.settled_ms)
    if not times:
        return "", "", "", ""
    ninety = statistics.quantiles(times, n=10, method="inclusive")[-1] if len(times) > 1 else times[0]
    return _f(times[0]), _f(ninety), _f(times[-1]), str(len(times))


def _throughput(runs: Sequence[Run]) -> Table:
    columns: dict[str, tuple[str, Callable[[Run], float | None]]] = {
        "samples/s": (".2f", lambda r: r.samples_per_s),
        "images/s": (".2f", lambda r: r.images_per_s),
        "tokens/s": (",.0f", lambda r: r.tokens_per_s),
        "TFLOP/s per GPU": (".1f", lambda r: r.tflops_per_gpu),
        "FLOP utilization": (".1%", lambda r: r.flop_utilization),
        "peak GiB": (".1f", lambda r: r.peak_gb),
        "graphs GiB": (".1f", lambda r: sum(c.memory_gb or 0.0 for c in r.graphs.values()) if r.graphs else None),
    }
    rows = [
        (label(run, runs), *(_f(value(run), form) for form, value in columns.values())) for run in runs if not run.error
    ]
    note = "All GPUs together, where nothing else is said. Tokens are the language model's, padding included."
    return _cut("Throughput and memory", ("run", *columns), rows, note)


def _losses(runs: Sequence[Run]) -> Table:
    """Return the first, some middle and the last losses, over each other."""
    shown = [run for run in runs if run.losses]
    steps = sorted({step for run in shown for step, _ in run.losses})
    some = sorted({steps[round(i * (len(steps) - 1) / 5)] for i in range(6)}) if steps else []
    by_run = [(run, dict(run.losses)) for run in shown]
    rows = [(label(run, runs), *(_f(values.get(step), ".5g") for step in some)) for run, values in by_run]
    return Table("Losses", ("run", *(f"step {step}" for step in some)), tuple(rows))


def _graphs(runs: Sequence[Run]) -> Table:
    """Return what graphs did as a whole, a row for each kind of graphs of each run."""
    rows = [(label(run, runs), kind, *_graph_cells(counts)) for run in runs for kind, counts in run.graphs.items()]
    header = ("run", "graphs", "replays", "replayed", "padding", "capture s", "warm-up", "fallbacks")
    return _cut("Graphs", header, rows, "Warm-up counts eager microbatches before capture.", names=2)


def _graph_cells(counts: GraphCounts) -> Row:
    return (
        str(counts.replays),
        f"{counts.replayed_share:.1%}",
        _f(counts.padding_share, ".1%"),
        _f(counts.capture_s),
        _f(counts.warmup_microbatches, "d"),
        ", ".join(f"{reason} {n}" for reason, n in sorted(counts.fallbacks.items())) or "none",
    )


def _buckets(runs: Sequence[Run]) -> list[Table]:
    """Return the buckets of every run whose source has them."""
    found = []
    for run in runs:
        for kind, counts in run.graphs.items():
            rows = tuple((b.name, str(b.replays), str(b.evaluations), f"{b.padding_share:.1%}") for b in counts.buckets)
            unused = f"{counts.unused_buckets} more were captured and not used." if counts.unused_buckets else ""
            header = ("bucket", "replays", "in evaluation", "padding")
            found.append(Table(f"Buckets: {label(run, runs)}, {kind}", header, rows, note=unused))
    return found


def _cut(title: str, header: Row, rows: Sequence[Row], note: str = "", names: int = 1) -> Table:
    """Return a table without the columns that no row has anything in, and without rows of nothing but names."""
    rows = [row for row in rows if any(row[names:])]
    kept = [i for i in range(len(header)) if i < names or any(row[i] for row in rows)]
    return Table(title, tuple(header[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in rows), names, note)


def _f(value: float | None, form: str = ".1f") -> str:
    return "" if value is None else format(value, form)


def to_terminal(page: Page) -> str:
    """Return a page as lines for a terminal."""
    lines = [page.title, *page.origins]
    for shown in page.tables:
        note = wrapped(shown.note) if shown.note else []
        lines += ["", shown.title, *table([shown.header, *shown.rows]), *note]
    said = [line for text in page.said for line in wrapped(text)]
    return "\n".join([*lines, *([""] if said else []), *said])


def to_markdown(page: Page) -> str:
    """Return a page as Markdown."""
    parts = [f"# {page.title}", *page.origins]
    if page.verdicts:
        lines = [f"* **{STATES[v.state]}** {label(v, page.runs)}: {v.reason}" for v in page.verdicts]
        parts += ["## Parity with eager", "\n".join(lines)]
    for shown in page.tables:
        rows = [tuple(cell.replace("|", "\\|") for cell in row) for row in shown.rows]
        parts += [f"## {shown.title}", markdown_table(shown.header, rows), *filter(None, [shown.note])]
    return "\n\n".join(parts) + "\n"


def to_json(page: Page) -> str:
    """Return a page as one JSON object: runs as they were read, verdicts, tables. What is no number is null."""
    runs = [{**asdict(run), "median_ms": run.median_ms, "flop_utilization": run.flop_utilization} for run in page.runs]
    return json.dumps(_finite({**asdict(page), "runs": runs}), allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def write_page(page: Page, markdown: Path | None = None, json: Path | None = None) -> None:
    """Write a page's files.

    Raises:
        OptionError: A file cannot be written.
    """
    for path, form in ((markdown, to_markdown), (json, to_json)):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            named = form(page).encode(errors="surrogateescape").decode(errors="replace")  # names have any bytes
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
    parser.add_argument("--title", help="title of the page")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        metavar="X",
        help="dense bf16 TFLOP/s of one GPU, for FLOP utilization of runs that do not name theirs",
    )


def run_report(args: Namespace, tell: Tell) -> int:
    """Write what was asked for and print the page by `tell`; returns 2 for input that is refused, else 0."""
    names = [Path(word.rpartition("=")[2] or word).name for word in args.runs]
    try:
        if args.peak_tflops is not None and not args.peak_tflops > 0:
            why = "it must be a number above 0. An H100 or H200 has 989.4."
            raise OptionError.because("peak-tflops", f"Cannot use --peak-tflops {args.peak_tflops:g}: {why}")
        page = make_page(read_runs(args.runs, args.peak_tflops), args.title or ", ".join(names))
        write_page(page, markdown=args.markdown)
    except OptionError as error:
        print(error, file=sys.stderr)
        return 2
    tell(to_json(page).removesuffix("\n") if args.json else to_terminal(page))
    return 0
