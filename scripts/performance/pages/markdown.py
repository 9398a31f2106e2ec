"""Records as Markdown: tables, where they were measured, and pages with parts between marks."""

import functools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.runs.results import ROOT

Records = list[dict[str, Any]]
MEASURED_WITH = ("torch", "transformer-engine", "megatron-core", "megatron-bridge")


def table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a Markdown table."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


@functools.cache
def stack() -> dict[str, str]:
    """Return the pinned releases that a record names."""
    lines = (ROOT / "requirements/stack.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name: pins[name] for name in MEASURED_WITH}


def listed(versions: dict[str, str]) -> str:
    """Return releases in a row."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def origin(records: Records, *, with_stack: bool = False) -> str:
    """Return one line with GPU, dates and commits; what is only computed has none of its own.

    Args:
        records: The measured ones.
        with_stack: Name all releases, also those that the stack pins.
    """
    records = [r for r in records if r["mode"] != "limit" and "error" not in r] or records
    first = records[0]
    shown = {name: v for name, v in first["versions"].items() if name != "commit"}
    if not with_stack:
        shown = {name: v for name, v in shown.items() if stack().get(name) != v}
    commits = ", ".join(dict.fromkeys(r["versions"]["commit"] for r in records))
    dates = " to ".join(dict.fromkeys(end(r["date"] for r in records) for end in (min, max)))
    parts = [_gpus(records), dates, listed(shown), f"commit {commits}", f"{first['repeats']} repeats."]
    return ", ".join(filter(None, parts))


def _gpus(records: Records) -> str:
    """Return the GPU of most records, and each other one with its cases."""
    (most, _), *others = Counter("no GPU" if r["gpu"] == "none" else r["gpu"] for r in records).most_common()
    return "; ".join([most, *(f"{gpu}: {', '.join(_cases(records, gpu))}" for gpu, _ in others)])


def _cases(records: Records, gpu: str) -> list[str]:
    """Return the cases of a GPU; of one that has parts, `a` of `a_b`, only itself."""
    cases = list(dict.fromkeys(r["case"] for r in records if r["gpu"] == gpu))
    return [case for case in cases if not any(case.startswith(f"{other}_") for other in cases)]


def by_case(records: Records, mode: str) -> dict[str, dict[str, Any]]:
    """Return a mode's measured records by case."""
    return {r["case"]: r for r in records if r["mode"] == mode and r.get("ms") is not None and "error" not in r}


def number(record: dict[str, Any] | None, name: str, form: str = ".1f") -> str:
    """Return a figure of a record as text, nothing where it is not there."""
    value = (record or {}).get(name)
    return "" if value is None else format(value, form)


def over_eager(record: dict[str, Any] | None, eager: dict[str, dict[str, Any]]) -> str:
    """Return a record's ms over those of its case's eager record, which another run may have measured."""
    baseline = eager.get(record["case"]) if record is not None else None
    return "" if record is None or baseline is None else f"{record['ms'] / baseline['ms']:.2f}"


def with_origin(text: str, records: Records) -> str:
    """Return a table below the line that names where it was measured."""
    return f"{origin(records)}\n\n{text}" if text else ""


def code(text: str) -> str:
    """Quote a program's message, so that it cannot end a cell."""
    return "`" + text.replace("|", "/").replace("`", "'") + "`"


def picture(folder: Path, name: str, text: str, prefix: str = "") -> str:
    """Return a plot as Markdown, nothing where it was not drawn.

    Args:
        folder: With the plots.
        name: The plot's file.
        text: What a reader who cannot see it gets.
        prefix: The path from the page to the folder.
    """
    return f"![{text}]({prefix}{name})" if (folder / name).exists() else ""


def fill(text: str, parts: dict[str, str]) -> str:
    """Return a page with its parts put between their marks, `<!-- NAME -->` and `<!-- /NAME -->`.

    Raises:
        ValueError: The page has no marks for a part.
    """
    for name, part in parts.items():
        before, found, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not found or not end:
            raise ValueError(f"the page has no marks <!-- {name} --> and <!-- /{name} -->; add them where it belongs")
        text = f"{before}{found}{part}{chr(10) if part else ''}{end}{after}"
    return text
