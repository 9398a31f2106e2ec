"""The answer of `bridge-cg explain` as text of at most 80 columns."""

from collections.abc import Sequence

from bridge_cg_plugin.cli.answers import wrapped
from bridge_cg_plugin.options.columns import text_table
from bridge_cg_plugin.options.explain import HEAD, WIDTHS
from bridge_cg_plugin.options.vision import PROVIDER_FIELDS

from .answer import Answer, Line
from .encoders import Measured, Row
from .forecast import Forecast
from .language import LanguageForecast, PackRow, said
from .steps import said as said_of_step

KERNELS, ATTENTION = PROVIDER_FIELDS["kernels"], PROVIDER_FIELDS["attention"]
_HEAD, _COLUMNS = (*HEAD, "time/eager", "why"), (*WIDTHS, 10, 34)
_FIGURES = (8, 8, 11, 11, 7, 12)
_PACK_FIGURES = (8, 11, 11, 11, 7, 12)


def render(answer: Answer) -> str:
    """Return an answer as lines for a person."""
    encoder = [f"vision encoder: {answer.encoder}"] if answer.encoder else []
    blocks = [_parts(answer.lines), _options(answer.lines), encoder]
    if answer.forecast is not None:
        blocks.append(_forecast(answer.forecast))
    if answer.language_model is not None:
        blocks.append(_language_model(answer.language_model))
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
    measured = found.measured
    if measured is None:
        return ["", f"Nothing was measured of this {found.encoder}."]
    head = ("tokens", "images", "eager ms", "graphs ms", "ratio", "GiB a slot")
    rows = [head, *(_figures(row) for row in found.rows)]
    table = ["".join(cell.rjust(width) for cell, width in zip(row, _FIGURES, strict=False)) for row in rows]
    notes = [f"{row.tokens} tokens: {row.note}." for row in found.rows if row.note]
    title = f"{found.encoder}, forward and backward of a microbatch:"
    return ["", title, *table, *notes, _source(measured), *_differs(found)]


def _language_model(found: LanguageForecast) -> list[str]:
    texts = list(said(found))
    if not found.rows:
        return ["", *texts]
    head = ("tokens", "documents", "eager ms", "graphs ms", "ratio", "GiB a slot")
    rows = [head, *(_pack_figures(row) for row in found.rows)]
    table = ["".join(cell.rjust(width) for cell, width in zip(row, _PACK_FIGURES, strict=True)) for row in rows]
    return ["", f"Language model of {found.model}, forward and backward of a pack:", *table, *texts]


def _pack_figures(row: PackRow) -> tuple[str, ...]:
    digits = ((row.eager_ms, 1), (row.graphs_ms, 1), (row.ratio, 2), (row.memory_gb, 1))
    return (str(row.tokens), str(row.documents), *("-" if n is None else f"{n:.{d}f}" for n, d in digits))


def _figures(row: Row) -> tuple[str, ...]:
    digits = ((row.eager_ms, 1), (row.graphs_ms, 1), (row.ratio, 2), (row.memory_gb, 1))
    return (str(row.tokens), str(row.images), *("-" if n is None else f"{n:.{d}f}" for n, d in digits))


def _source(measured: Measured) -> str:
    where = f"{measured.file}, {measured.date}, {measured.gpu}"
    if measured.fit is None:
        return f"Records of {where}. {measured.remark}"
    fit = measured.fit
    return (
        f"By a cost model fitted to {where}. Records left out of the fit in turn are within {fit.eager:.0%} (eager), "
        f"{fit.graphs:.0%} (graphs), {fit.ratio:.0%} (ratio) and {fit.memory:.0%} (memory). {measured.remark}"
    )


def _differs(found: Forecast) -> list[str]:
    if not found.differs or found.measured is None:
        return []
    measured = found.measured
    options = "default options" if measured.fit and "auto" in measured.kernels else f"{KERNELS}={measured.kernels[0]}"
    options += "" if "auto" in measured.attention else f", {ATTENTION}={measured.attention[0]}"
    figures = f"The figures are of one {measured.gpu}, an encoder trained whole, and {options}."
    return [f"Not measured here: {', '.join(found.differs)}. {figures}"]
