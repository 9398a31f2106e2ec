"""Microbatches that the project measured, on graphs and eager: what plans and `bridge-cg explain` go by.

`measured.json` has them. A test holds every figure to docs/benchmarks.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from .shapes import LanguageModel, Ranks, other_ranks

FILE = Path(__file__).with_name("measured.json")
# The models that plans go by where no recipe names one.
TOWER = "Qwen3-VL encoder of 27 layers of 1152"
DENSE = LanguageModel(attention=16, mlps=16, hidden=2048, queries=2048, keys=1024, mlp=6144)


@dataclass(frozen=True, slots=True)
class Row:
    """One microbatch, forward and backward.

    Attributes:
        case, mode: Of its record.
        tokens: Its tokens, or patches.
        eager_ms, graphs_ms: Times.
        memory_gb: GiB of a slot whose largest bucket has these tokens; None where no record has it.
    """

    case: str
    mode: str
    tokens: int
    eager_ms: float
    graphs_ms: float
    memory_gb: float | None

    @property
    def ratio(self) -> float:
        """Time on graphs over time eager."""
        return self.graphs_ms / self.eager_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Microbatches of one model, trained whole.

    Attributes:
        of: The model in words.
        kind: "vision", or the kind of a language model.
        file, date, gpu: Of the records.
        rows: The microbatches, ascending.
        kernels, attention: Values of these keys of `vision_cuda_graph_tuning` that they hold for.
        modules: Value of `cuda_graph_modules` that they hold for.
        ranks: How GPUs share the model.
        remark: What else to know of them.
    """

    of: str
    kind: str
    file: str
    date: str
    gpu: str
    rows: tuple[Row, ...]
    kernels: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    ranks: Ranks = field(default_factory=Ranks)
    remark: str = ""

    @property
    def source(self) -> str:
        """Where they come from."""
        return f"{self.file}, {self.date}, {self.gpu}"

    def memory_gb(self, tokens: int) -> float | None:
        """Return GiB of a slot whose largest bucket has so many tokens: those of the nearest record, by tokens."""
        known = [(row.tokens, row.memory_gb) for row in self.rows if row.memory_gb is not None]
        if not known:
            return None
        size, memory = min(known, key=lambda one: abs(one[0] - tokens))
        return memory * tokens / size


@cache
def measured() -> dict[str, Any]:
    """Return what the package has of the records."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


@cache
def records() -> tuple[Measured, ...]:
    """Return all measured microbatches."""
    return tuple(_measured_of(found) for found in measured()["records"])


def _measured_of(found: Mapping[str, Any]) -> Measured:
    lists = {name: tuple(found.get(name, ())) for name in ("kernels", "attention", "modules")}
    rows = tuple(Row(**row) for row in found["rows"])
    return Measured(**{**found, **lists, "rows": rows, "ranks": Ranks(**found.get("ranks", {}))})


def of_encoder(name: str, kernels: str) -> tuple[Measured, ...]:
    """Return the records of a vision encoder, with these kernels if possible; none where there are none."""
    found = [each for each in records() if each.of == name]
    return tuple([each for each in found if kernels in each.kernels] or found)[:1]


def of_language_model(
    model: LanguageModel, ranks: Ranks, modules: Iterable[str] = ()
) -> tuple[tuple[Measured, ...], tuple[str, ...]]:
    """Return the records that are nearest to a language model, and how its ranks differ, each as it is written.

    They are of its kind: over the same ranks, else on one GPU; of the same layers and width, else all.
    """
    wanted = tuple(sorted(modules))
    of_kind = [each for each in records() if each.kind == model.kind]
    of_kind = [each for each in of_kind if each.modules == wanted] or [each for each in of_kind if not each.modules]
    alike = [each for each in of_kind if each.ranks == ranks]
    found = alike or [each for each in of_kind if each.ranks == Ranks()]
    same = [each for each in found if each.of == str(model)]
    return tuple(same or found), tuple(other_ranks(found[0].ranks, ranks))


def least_and_greatest(rows: Iterable[Row]) -> tuple[float, float] | None:
    """Return the least and the greatest ratio; None without rows."""
    ratios = [row.ratio for row in rows]
    return (min(ratios), max(ratios)) if ratios else None


class Costs:
    """What microbatches cost, in tokens: a replay its bucket's, an eager one its own over a measured ratio."""

    def __init__(self, found: Sequence[Measured], of: str, notes: Sequence[str] = ()) -> None:
        """Take the records.

        Args:
            found: At least one model's.
            of: The model that is planned for.
            notes: What of it was not measured.
        """
        rows = [row for each in found for row in each.rows]
        self._sizes = sorted({row.tokens for row in rows})
        self._ratios = [[row.ratio for row in rows if row.tokens == size] for size in self._sizes]
        self._same = next((each for each in found if each.of == of and not notes), None)
        self.origin = "; ".join([_origin(found, self._sizes), *_other_model(found, of), *notes])

    def eager(self, tokens: int) -> tuple[float, float]:
        """Return the least and the greatest cost of a microbatch run eager, by the records around its size."""
        first = max(bisect_right(self._sizes, tokens) - 1, 0)
        last = min(bisect_left(self._sizes, tokens), len(self._sizes) - 1)
        near = (*self._ratios[first], *self._ratios[last])
        return tokens / max(near), tokens / min(near)

    def memory_gb(self, tokens: int) -> float | None:
        """Return GiB of a slot whose largest bucket has so many tokens; None where no record is of such a model."""
        return None if self._same is None else self._same.memory_gb(tokens)


def _origin(found: Sequence[Measured], sizes: Sequence[int]) -> str:
    models = " and ".join(dict.fromkeys(each.of for each in found))
    sources = " and ".join(dict.fromkeys(each.source for each in found))
    return f"{models}, {sizes[0]} to {sizes[-1]} tokens: {sources} only"


def _other_model(found: Sequence[Measured], of: str) -> list[str]:
    return [] if any(each.of == of for each in found) else [f"no record is of {of}"]
