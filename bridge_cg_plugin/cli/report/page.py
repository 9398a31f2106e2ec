"""What a page says, before anything decides how it looks."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge_cg_plugin.options import OptionError

from .runs import WARM_UP, GraphCounts, Run
from .verdict import Verdict, verdicts

Row = tuple[str, ...]


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


def make_page(runs: Sequence[Run], title: str = "Training runs") -> Page:
    """Return the page of these runs."""
    tables = (step_times(runs), throughput(runs), losses(runs), graphs(runs), *bucket_tables(runs))
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


def label(run: Run, runs: Sequence[Run]) -> str:
    """Return a run's name: its mode, with its case where there are several."""
    return run.mode if len({r.case for r in runs}) == 1 else f"{run.case}: {run.mode}"


def eager_ms(run: Run, runs: Iterable[Run]) -> float | None:
    """Return the fastest median of a case's eager runs in milliseconds."""
    found = [e.median_ms for e in runs if e.is_eager and e.case == run.case and e.median_ms and not e.error]
    return min(found, default=None)


def step_times(runs: Sequence[Run]) -> Table:
    """Return the times of a step, over eager's."""
    rows = []
    for run in runs:
        if run.error:
            rows.append((label(run, runs), *[""] * 6, f"failed: {run.error}"))
        elif run.median_ms is not None:
            base = eager_ms(run, runs)
            ratio = f"{run.median_ms / base:.2f}" if base else ""
            few = "warm-up included" if run.times and not run.settled_ms else ""
            rows.append((label(run, runs), _f(run.median_ms), ratio, *_spread_of(run), "; ".join(_notes(run, few))))
    header = ("run", "median ms", "over eager", "fastest ms", "90 % below ms", "slowest ms", "steps", "note")
    note = f"Without the first {WARM_UP} steps: warm-up, capture and the first replays are among them."
    return _cut("Step time", header, rows, note)


def _notes(run: Run, *others: str) -> list[str]:
    return [text for text in (run.wrong, *others) if text]


def _spread_of(run: Run) -> Row:
    times = sorted(run.settled_ms)
    if not times:
        return "", "", "", ""
    ninety = statistics.quantiles(times, n=10, method="inclusive")[-1] if len(times) > 1 else times[0]
    return _f(times[0]), _f(ninety), _f(times[-1]), str(len(times))


def throughput(runs: Sequence[Run]) -> Table:
    """Return what a second does, and memory."""
    columns: dict[str, Callable[[Run], float | None]] = {
        "samples/s": lambda r: r.samples_per_s,
        "images/s": lambda r: r.images_per_s,
        "tokens/s": lambda r: r.tokens_per_s,
        "TFLOP/s per GPU": lambda r: r.tflops_per_gpu,
        "FLOP utilization": lambda r: r.flop_utilization,
        "peak GiB": lambda r: r.peak_gb,
        "graphs GiB": lambda r: sum(c.memory_gb or 0.0 for c in r.graphs.values()) if r.graphs else None,
    }
    forms = {"FLOP utilization": ".1%", "tokens/s": ",.0f", "samples/s": ".2f", "images/s": ".2f"}
    rows = [
        (label(run, runs), *(_f(value(run), forms.get(name, ".1f")) for name, value in columns.items()))
        for run in runs
        if not run.error
    ]
    note = "All GPUs together, where nothing else is said. Tokens are the language model's, padding included."
    return _cut("Throughput and memory", ("run", *columns), rows, note)


def losses(runs: Sequence[Run]) -> Table:
    """Return the first, some middle and the last losses, over each other."""
    shown = [run for run in runs if run.losses]
    steps = sorted({step for run in shown for step, _ in run.losses})
    some = sorted({steps[round(i * (len(steps) - 1) / 5)] for i in range(6)}) if steps else []
    by_run = [(run, dict(run.losses)) for run in shown]
    rows = [(label(run, runs), *(_f(values.get(step), ".5g") for step in some)) for run, values in by_run]
    return Table("Losses", ("run", *(f"step {step}" for step in some)), tuple(rows))


def graphs(runs: Sequence[Run]) -> Table:
    """Return what graphs did as a whole, a row for each kind of graphs of each run."""
    rows = [(label(run, runs), kind, *_graph_cells(counts)) for run in runs for kind, counts in run.graphs.items()]
    header = ("run", "graphs", "replays", "replayed", "padding", "capture s", "warm-up", "fallbacks")
    return _cut("Graphs", header, rows, "Warm-up counts eager microbatches before capture.", names=2)


def _graph_cells(counts: GraphCounts) -> Row:
    reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(counts.fallbacks.items()))
    warm_up = "" if counts.warmup_microbatches is None else str(counts.warmup_microbatches)
    return (
        str(counts.replays),
        f"{counts.replayed_share:.1%}",
        _f(counts.padding_share, ".1%"),
        _f(counts.capture_s),
        warm_up,
        reasons or "none",
    )


def bucket_tables(runs: Sequence[Run]) -> list[Table]:
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


def text_of(path: Path, errors: str = "strict") -> str:
    """Return a file's text.

    Args:
        path: The file.
        errors: What becomes of bytes that are no UTF-8; see `str.decode`.

    Raises:
        OptionError: The file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or f"it is no text: {error}"
        raise OptionError.because("run", f"Cannot read {path}: {why}.") from None
