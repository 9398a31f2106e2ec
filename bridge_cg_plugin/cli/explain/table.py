"""The answer of `bridge-cg explain` as text of at most 80 columns."""

from collections.abc import Iterator, Sequence

from bridge_cg_plugin.cli.answers import wrapped
from bridge_cg_plugin.cli.planner.records import Row
from bridge_cg_plugin.options.columns import text_table
from bridge_cg_plugin.options.explain import HEAD, WIDTHS

from .answer import Answer, Line
from .forecast import Forecast, said
from .steps import said as said_of_step

_HEAD, _COLUMNS = (*HEAD, "time/eager", "why"), (*WIDTHS, 10, 34)
_HEADS = ("case", "tokens", "eager ms", "graphs ms", "ratio", "GiB a slot")
_FIGURES = (26, 8, 10, 11, 7, 12)


def render(answer: Answer) -> str:
    """Return an answer as lines for a person."""
    encoder = [f"vision encoder: {answer.encoder}"] if answer.encoder else []
    blocks = [_parts(answer.lines), _options(answer.lines), encoder]
    blocks += [_forecast(found) for found in (answer.forecast, answer.language_model) if found is not None]
    if answer.step is not None:
        blocks.append(["", said_of_step(answer.step)])
    blocks.append([*answer.notes, *(f"warning: {text}" for text in answer.options.warnings)])
    return "\n".join(line for block in blocks for text in block for line in wrapped(text))


def _parts(lines: Sequence[Line]) -> list[str]:
    rows = [_HEAD, *((line.part, line.runs, line.memory, line.ratio, line.why) for line in lines)]
    return text_table(rows, _COLUMNS)


def _options(lines: Sequence[Line]) -> list[str]:
    options = [option for line in lines for option in line.options]
    return [f"options: {' '.join(options)}"] if options else []


def _forecast(found: Forecast) -> list[str]:
    if not found.measured:
        return ["", *said(found)]
    if found.same is None:
        models = " and ".join(dict.fromkeys(each.of for each in found.measured))
        title = f"{found.of} was not measured. The nearest, forward and backward of a microbatch: {models}"
    else:
        title = f"{found.of}, forward and backward of a microbatch"
    rows = [_HEADS, *(_figures(row) for row in found.rows)]
    table = ["".join(_cells(row)) for row in rows]
    return ["", f"{title}:", *table, *said(found)]


def _cells(row: Sequence[str]) -> Iterator[str]:
    yield row[0].ljust(_FIGURES[0])
    yield from (cell.rjust(width) for cell, width in zip(row[1:], _FIGURES[1:], strict=True))


def _figures(row: Row) -> tuple[str, ...]:
    memory = "-" if row.memory_gb is None else f"{row.memory_gb:.1f}"
    return (row.case, str(row.tokens), f"{row.eager_ms:.1f}", f"{row.graphs_ms:.1f}", f"{row.ratio:.2f}", memory)
