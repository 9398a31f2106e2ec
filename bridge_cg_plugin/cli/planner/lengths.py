"""Reading document lengths, or whole packs, from a dataset's files."""

import difflib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from .errors import PlanError
from .packing import Pack


def json_lines(path: Path) -> Iterator[Any]:
    """Yield the rows; blank lines are none. Text in a row may hold separators of lines that are not JSON's.

    Raises:
        ValueError: A row is no JSON; has its number.
    """
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    for number, line in enumerate(line for line in lines if line.strip()):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"row {number}: {error.msg}") from None


# A plan from so many values takes seconds; more of them in the same shares change nothing in it.
MOST = 200_000


def whole_count(value: Any) -> int | None:
    """Return a count of a JSON file as a whole number of at least 0, None for what is none; 3e5 is one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def drawn[Value](counts: Sequence[tuple[Value, int]]) -> list[Value]:
    """Return every value as often as it counts.

    Above `MOST` in all, counts are scaled down in the same shares, and what is there at all stays there once.

    Args:
        counts: Values and how often each is there, at least 0.
    """
    total = sum(count for _, count in counts)
    if total > MOST:
        counts = [(value, max(count * MOST // total, 1)) for value, count in counts if count]
    return [value for value, count in counts for _ in range(count)]


LENGTH_FIELDS = ("length", "num_tokens", "token_count", "n_tokens")
TOKEN_FIELDS = ("input_ids", "tokens")
STARTS = "seq_start_id"
FORMATS = ".json, .jsonl, .parquet, .arrow, .feather, .npy, or a folder of .arrow or .parquet files"


@dataclass(frozen=True, slots=True)
class Documents:
    """What a dataset holds.

    Attributes:
        lengths: Tokens of every document; empty where the file holds packs.
        packs: Packs that Bridge has made already.
        fields: Whether lengths were read from fields of rows.
    """

    lengths: tuple[int, ...] = ()
    packs: tuple[Pack, ...] = ()
    fields: bool = False


def read_documents(path: Path, field: str | None = None) -> Documents:
    """Read a dataset's lengths.

    A `.json` file is a histogram `{"length": count}` or a list of lengths. A row of the others has a length in a field
    of its own (`length`, `num_tokens`, or `field`) or a list of tokens; rows with `seq_start_id` are Bridge's packs.

    Raises:
        PlanError: The file cannot be read, or a row has no length.
    """
    if not path.exists():
        raise PlanError(f"Cannot plan from {path}: it does not exist. It must be {FORMATS}.")
    try:
        rows = _rows(path, field)
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"Cannot read {path}: {error}.") from None
    packs, lengths, fields = [], [], False
    for number, row in enumerate(rows):
        fields = fields or isinstance(row, dict)
        if isinstance(row, dict) and row.get(STARTS) is not None:
            packs.append(_pack(row, f"{path}, row {number}"))
        else:
            lengths.append(_length(row, field, f"{path}, row {number}"))
    if packs and lengths:
        raise PlanError(f"Cannot plan from {path}: it has packs and single documents, and must have one kind.")
    if not (packs or lengths):
        raise PlanError(f"Cannot plan from {path}: it has no documents.")
    return Documents(tuple(lengths), tuple(packs), fields)


def _rows(path: Path, field: str | None) -> Iterable[Any]:
    suffix = path.suffix.lower()
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in (".arrow", ".parquet"))
        if not files:
            raise PlanError(f"Cannot plan from {path}: it has no .arrow or .parquet files.")
        return [row for file in files for row in _rows(file, field)]
    if suffix == ".json":
        return _histogram(json.loads(path.read_text(encoding="utf-8-sig")), path)
    if suffix == ".jsonl":
        return list(json_lines(path))
    if suffix in (".parquet", ".arrow", ".feather"):
        return _table_rows(path, field)
    if suffix == ".npy":
        return _packed_numpy(path)
    raise PlanError(f"Cannot plan from {path}: it must be {FORMATS}.")


def _histogram(found: Any, path: Path) -> list[int]:
    if isinstance(found, dict):
        counts = {length: whole_count(count) for length, count in found.items()}
        if any(count is None or not length.isdecimal() for length, count in counts.items()):
            raise PlanError(
                f'Cannot plan from {path}: it must be {{"length": count}} in whole numbers, no count below 0.'
            )
        return drawn(sorted((int(length), count or 0) for length, count in counts.items()))
    if isinstance(found, list):
        return found
    raise PlanError(f'Cannot plan from {path}: it must be a histogram {{"length": count}} or a list of lengths.')


def _table_rows(path: Path, field: str | None) -> list[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise PlanError(f"Cannot read {path} without pyarrow: pip install 'bridge-cg-plugin[plan]'.") from None
    known = {*LENGTH_FIELDS, *TOKEN_FIELDS, STARTS, field}
    try:
        if path.suffix == ".parquet":
            table = pyarrow.parquet.read_table(path)
        else:
            with pyarrow.memory_map(str(path)) as source:
                try:
                    table = pyarrow.ipc.open_file(source).read_all()
                except pyarrow.ArrowInvalid:
                    source.seek(0)
                    table = pyarrow.ipc.open_stream(source).read_all()
    except pyarrow.ArrowInvalid as error:
        raise PlanError(f"Cannot read {path}: {error}.") from None
    names = [name for name in table.column_names if name in known] or table.column_names
    rows: list[dict[str, Any]] = table.select(names).to_pylist()
    return rows


def _packed_numpy(path: Path) -> Sequence[Any]:
    from bridge_cg_plugin.upstream.decoder.files import load_packed_numpy

    return load_packed_numpy(path)


def _length(row: Any, field: str | None, where: str) -> int:
    value = row
    if isinstance(row, dict):
        names = (field,) if field is not None else (*LENGTH_FIELDS, *TOKEN_FIELDS)
        name = next((n for n in names if n in row), None)
        if name is None and field is not None:
            near = difflib.get_close_matches(field, row, n=1)
            there = f"Did you mean {near[0]}?" if near else f"It has {', '.join(row)}."
            raise PlanError(f"Cannot use --field {field}: {where} has no such field. {there}")
        if name is None:
            found = f"it must have a field of {', '.join(names)}, and has {', '.join(row)}"
            raise PlanError(f"Cannot plan from {where}: {found}. Use --field.")
        value = row[name]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        value = len(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"Cannot plan from {where}: {value!r} must be a whole number of at least 1 tokens.")
    return value


def _pack(row: dict[str, Any], where: str) -> Pack:
    """Return a pack as Bridge trains on it: a document has one token less, which is only a label.

    Raises:
        PlanError: The row is no pack.
    """
    try:
        bounds = [*(int(start) for start in row[STARTS]), len(row["input_ids"])]
    except (KeyError, TypeError, ValueError):
        raise PlanError(f"Cannot plan from {where}: {STARTS} must list whole numbers, beside input_ids.") from None
    lengths = tuple(after - before - 1 for before, after in pairwise(bounds))
    if not lengths or min(lengths) < 0:
        raise PlanError(f"Cannot plan from {where}: {STARTS}={bounds[:-1]} must ascend to its {bounds[-1]} tokens.")
    return tuple(n for n in lengths if n) or (1,)
