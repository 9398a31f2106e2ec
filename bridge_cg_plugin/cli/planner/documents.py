"""Reading lengths of documents from a dataset's files, and packing them as Bridge does."""

import difflib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bridge_cg_plugin.graphs.buckets import round_up

from ..answers import AnswerError

Pack = tuple[int, ...]
FORMATS = ".json, .jsonl, .parquet, .arrow, .feather, .npy, or a folder of .arrow or .parquet files"
# A plan from so many values takes seconds; more of them in the same shares change nothing in it.
MOST = 200_000


def _rows(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    suffix = path.suffix.lower()
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in (".arrow", ".parquet"))
        if not files:
            raise AnswerError(f"Cannot plan from {path}: it has no .arrow or .parquet files.")
        for file in files:
            yield from _rows(file, columns)
    elif suffix == ".json":
        found = json.loads(path.read_text(encoding="utf-8-sig"))
        yield from found if isinstance(found, list) else _histogram(found, path)
    elif suffix == ".jsonl":
        yield from _json_lines(path)
    elif suffix in (".parquet", ".arrow", ".feather"):
        yield from _table_rows(path, columns)
    elif suffix == ".npy":
        from bridge_cg_plugin.upstream.hooks.recipes import load_packed_numpy

        yield from load_packed_numpy(path)
    else:
        raise AnswerError(f"Cannot plan from {path}: it must be {FORMATS}.")


def _json_lines(path: Path) -> Iterator[Any]:
    # Text in a row may hold separators of lines that are not JSON's.
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    for number, line in enumerate(line for line in lines if line.strip()):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"row {number}: {error.msg}") from None


def _histogram(found: Any, path: Path) -> list[int]:
    """Return every length as often as it counts; above `MOST` in all, scaled down in the same shares."""
    if not isinstance(found, dict):
        raise AnswerError(f'Cannot plan from {path}: it must be a histogram {{"length": count}} or a list.')
    counts = []
    for name, count in found.items():
        number = int(count) if isinstance(count, float) and count.is_integer() else count  # 3e5 is one
        if not name.isdecimal() or isinstance(number, bool) or not isinstance(number, int) or number < 0:
            what = 'must be "length": count, in whole numbers, no count below 0'
            raise AnswerError(f"Cannot plan from {path}: {name!r}: {count!r} {what}.")
        counts.append((int(name), number))
    total = sum(number for _, number in counts)
    if total > MOST:
        counts = [(size, max(number * MOST // total, 1)) for size, number in counts if number]
    return [size for size, number in counts for _ in range(number)]


def _table_rows(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise AnswerError(f"Cannot read {path} without pyarrow: pip install 'bridge-cg-plugin[plan]'.") from None
    if path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
    else:
        with pyarrow.memory_map(str(path)) as source:
            try:
                table = pyarrow.ipc.open_file(source).read_all()
            except pyarrow.ArrowInvalid:
                source.seek(0)
                table = pyarrow.ipc.open_stream(source).read_all()
    names = [name for name in table.column_names if name in columns] or table.column_names
    rows: list[dict[str, Any]] = table.select(names).to_pylist()
    return rows


LENGTH_FIELDS = ("length", "num_tokens", "token_count", "n_tokens")
TOKEN_FIELDS = ("input_ids", "tokens")
STARTS = "seq_start_id"


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
        AnswerError: The file cannot be read, or a row has no length.
    """
    columns = (*LENGTH_FIELDS, *TOKEN_FIELDS, STARTS, *([field] if field is not None else ()))
    if not path.exists():
        raise AnswerError(f"Cannot plan from {path}: it does not exist. It must be {FORMATS}.")
    try:
        rows = list(_rows(path, columns))
    except (OSError, ValueError, EOFError) as error:
        raise AnswerError(f"Cannot read {path}: {error}.") from None
    if not rows:
        raise AnswerError(f"Cannot plan from {path}: it has no documents.")
    packs, lengths, fields = [], [], False
    for number, row in enumerate(rows):
        fields = fields or isinstance(row, dict)
        if isinstance(row, dict) and row.get(STARTS) is not None:
            packs.append(_pack(row, f"{path}, row {number}"))
        else:
            lengths.append(_length(row, field, f"{path}, row {number}"))
    if packs and lengths:
        raise AnswerError(f"Cannot plan from {path}: it has packs and single documents, and must have one kind.")
    return Documents(tuple(lengths), tuple(packs), fields)


def _length(row: Any, field: str | None, where: str) -> int:
    value = row
    if isinstance(row, dict):
        names = (field,) if field is not None else (*LENGTH_FIELDS, *TOKEN_FIELDS)
        name = next((n for n in names if n in row), None)
        if name is None and field is not None:
            near = difflib.get_close_matches(field, row, n=1)
            there = f"Did you mean {near[0]}?" if near else f"It has {', '.join(row)}."
            raise AnswerError(f"Cannot use --field {field}: {where} has no such field. {there}")
        if name is None:
            found = f"it must have a field of {', '.join(names)}, and has {', '.join(row)}"
            raise AnswerError(f"Cannot plan from {where}: {found}. Use --field.")
        value = row[name]
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        value = len(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise AnswerError(f"Cannot plan from {where}: {value!r} must be a whole number of at least 1 tokens.")
    return value


def _pack(row: dict[str, Any], where: str) -> Pack:
    """Return a pack as Bridge trains on it: a document has one token less, which is only a label.

    Raises:
        AnswerError: The row is no pack.
    """
    try:
        bounds = [*(int(start) for start in row[STARTS]), len(row["input_ids"])]
    except (KeyError, TypeError, ValueError):
        raise AnswerError(f"Cannot plan from {where}: {STARTS} must list whole numbers, beside input_ids.") from None
    lengths = tuple(after - before - 1 for before, after in pairwise(bounds))
    if not lengths or min(lengths) < 0:
        raise AnswerError(f"Cannot plan from {where}: {STARTS}={bounds[:-1]} must ascend to its {bounds[-1]} tokens.")
    return tuple(n for n in lengths if n) or (1,)


def first_fit(lengths: Sequence[int], size: int) -> list[Pack]:
    """Put every document into the first pack that has room for it.

    Raises:
        AnswerError: A document is longer than a pack.
    """
    if lengths and max(lengths) > size:
        raise AnswerError(
            f"Cannot use --pack-size {size}: a document has {max(lengths)} tokens. Raise it, or cut with --truncate."
        )
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [size] * (2 * leaves)  # a tree: a node has the most room of the packs below it
    packs: list[list[int]] = []
    for length in lengths:
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        place = node - leaves
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
        if place == len(packs):
            packs.append([])
        packs[place].append(length)
    return [tuple(pack) for pack in packs]


def first_fit_shuffle(lengths: Sequence[int], size: int, seed: int = 0) -> list[Pack]:
    """First fit in random order."""
    return first_fit(random.Random(seed).sample(lengths, len(lengths)), size)


def in_batch(lengths: Sequence[int], count: int, seed: int = 0) -> list[Pack]:
    """Join every `count` documents of a random order, as in-batch packing joins a microbatch."""
    order = random.Random(seed).sample(lengths, len(lengths))
    return [tuple(order[i : i + count]) for i in range(0, len(order) - count + 1, count)]


def padded_documents(lengths: Sequence[int], multiple: int) -> tuple[int, ...]:
    """Return lengths rounded up to a multiple of `multiple` tokens, so that ranks can share every document."""
    return tuple(round_up(length, multiple) for length in lengths)


def padded_packs(packs: Sequence[Pack], multiple: int) -> list[Pack]:
    """Return packs of a multiple of `multiple` tokens; what is missing is a document of its own, as Bridge has it."""
    return [(*pack, rest) if (rest := -sum(pack) % multiple) else tuple(pack) for pack in packs]
