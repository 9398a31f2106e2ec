"""A page as terminal output, Markdown and JSON."""

import json
import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from bridge_cg_plugin.options.explain import table as markdown_table

from .page import Page, Table

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod

STATES = {"same": "SAME", "different": "DIFFERENT", "unknown": "NO VERDICT"}
# What text keeps at least in a narrow terminal.
NAME_WIDTH, TEXT_WIDTH = 24, 12
# Blanks around a column and the line behind it.
PADDING = 3
_RICH = {"same": "bold green", "different": "bold red", "unknown": "bold yellow"}


def to_terminal(page: Page, console: "Console") -> None:
    """Print a page."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table as RichTable

    console.print(f"[bold]{escape(page.title)}[/bold]")
    for line in page.origins:
        console.print(escape(line), style="dim")
    for whole in page.tables:
        table, aside = _fitting(whole, console.width)
        shown = RichTable(
            title=escape(table.title),
            title_justify="left",
            caption=escape(table.note) or None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
        )
        for index, name in enumerate(table.header):
            justify: JustifyMethod = "left" if _has_text(table, index) else "right"
            shown.add_column(escape(name), justify=justify, min_width=_least_width(table, index), overflow="fold")
        for row in table.rows:
            shown.add_row(*map(escape, row))
        console.print(shown)
        for line in aside:
            console.print(escape(line))
    for verdict in page.verdicts:
        state = f"[{_RICH[verdict.state]}]{STATES[verdict.state]}[/]"
        console.print(f"{state} {escape(_who(page, verdict.case, verdict.mode))}: {escape(verdict.reason)}")


def to_markdown(page: Page) -> str:
    """Return a page as Markdown."""
    parts = [f"# {page.title}", *page.origins]
    if page.verdicts:
        lines = [f"* **{STATES[v.state]}** {_who(page, v.case, v.mode)}: {v.reason}" for v in page.verdicts]
        parts += ["## Parity with eager", "\n".join(lines)]
    for table in page.tables:
        rows = [tuple(cell.replace("|", "\\|") for cell in row) for row in table.rows]
        parts += [f"## {table.title}", markdown_table(table.header, rows), *filter(None, [table.note])]
    return "\n\n".join(parts) + "\n"


def to_json(page: Page) -> str:
    """Return a page as one JSON object: runs as they were read, verdicts, tables. What is no number is null."""
    runs = [{**asdict(run), "median_ms": run.median_ms, "flop_utilization": run.flop_utilization} for run in page.runs]
    whole = {
        "title": page.title,
        "origins": page.origins,
        "verdicts": [asdict(verdict) for verdict in page.verdicts],
        "runs": runs,
        "tables": [asdict(table) for table in page.tables],
    }
    return json.dumps(_finite(whole), allow_nan=False) + "\n"


def _fitting(table: Table, width: int) -> tuple[Table, list[str]]:
    """Return a table without its last column where a terminal is too narrow for its text, and that text in lines."""
    last = len(table.header) - 1
    needed = sum(_least_width(table, index) + PADDING for index in range(last + 1))
    if needed <= width or last < table.names or not _is_text(table, last):
        return table, []
    cut = replace(table, header=table.header[:last], rows=tuple(row[:last] for row in table.rows))
    return cut, [f"{' '.join(row[: table.names])}: {row[last]}" for row in table.rows if row[last]]


def _has_text(table: Table, index: int) -> bool:
    return index < table.names or _is_text(table, index)


def _least_width(table: Table, index: int) -> int:
    """Return the width that a column keeps: figures have all of theirs, headers break at blanks."""
    longest = max(len(row[index]) for row in table.rows)
    if not _has_text(table, index):
        return max(longest, *map(len, table.header[index].split()))
    return min(longest, NAME_WIDTH if index < table.names else TEXT_WIDTH)


def _is_text(table: Table, index: int) -> bool:
    return any(row[index] and not row[index][0].isdigit() and row[index][0] != "-" for row in table.rows)


def _who(page: Page, case: str, mode: str) -> str:
    return mode if len({run.case for run in page.runs}) == 1 else f"{case}: {mode}"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
