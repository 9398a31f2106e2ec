"""What benchmarks share: parsers of command lines, and records, whose fields docs/benchmarks/format.md explains."""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.runs.results import ROOT, write_records

FOLDER = ROOT / "docs" / "benchmarks"
REQUIRED = ("case", "mode", "repeats", "seed", "date", "gpu", "versions", "command")
MEASUREMENTS = ("ms", "forward_rel", "fp32_mean")


@cache
def fields() -> frozenset[str]:
    """Return the names that docs/benchmarks/format.md has."""
    return frozenset(re.findall(r"`(\w+)`", (FOLDER / "format.md").read_text()))


def check_record(record: dict[str, Any]) -> None:
    """Make sure that a record is as docs/benchmarks/format.md says.

    Raises:
        ValueError: A field is missing, empty or unknown.
    """
    where = f"record {record.get('case')}/{record.get('mode')}"
    if missing := [name for name in REQUIRED if record.get(name) is None]:
        raise ValueError(f"{where}: {', '.join(missing)} missing")
    if not any(name in record for name in (*MEASUREMENTS, "error")):
        raise ValueError(f"{where}: neither a measurement ({', '.join(MEASUREMENTS)}) nor an error")
    if unknown := record.keys() - fields():
        raise ValueError(f"{where}: unknown field {min(unknown)!r}; add it to docs/benchmarks/format.md")


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return a file's records; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def put_record(path: Path, record: dict[str, Any]) -> None:
    """Write one record, in place of an earlier one of the same case and mode."""
    check_record(record)
    key = (record["case"], record["mode"])
    kept = [r for r in read_records(path) if (r["case"], r["mode"]) != key]
    write_records(path, [*kept, record])


def put_cases(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write the records of whole cases, in place of all earlier ones of these cases, of whichever modes."""
    for record in records:
        check_record(record)
    cases = {record["case"] for record in records}
    write_records(path, [*(r for r in read_records(path) if r["case"] not in cases), *records])


def loss_distance(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference of matching losses of two runs."""
    return max(abs(one - other) / abs(other) for one, other in zip(losses, expected, strict=True))


def output_path(given: Path | None, name: str) -> Path:
    """Return where records go: what was given, or docs/benchmarks.

    Raises:
        ValueError: Nothing was given and there is no GPU: such times are for tests and must not replace measured ones.
    """
    if given is not None:
        return given
    import torch

    if not torch.cuda.is_available():
        raise ValueError("Cannot write to docs/benchmarks what is measured without a GPU. Pass --out FILE.")
    return ROOT / "docs/benchmarks" / name


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def names_of(*names: str) -> Callable[[str], tuple[str, ...]]:
    """Return a parser of comma-separated names, each of which must be one of these."""

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(name.strip() for name in text.split(",") if name.strip())
        for name in found:
            if name not in names:
                raise argparse.ArgumentTypeError(f"must be of {', '.join(names)}, not {name!r}")
        return found

    return parse


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} on, not {text!r}")
        return int(text)

    return parse
