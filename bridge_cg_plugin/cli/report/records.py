"""Runs from benchmark records; docs/benchmarks/format.md has their fields."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge_cg_plugin.options import OptionError

from .gpus import peak_tflops
from .kinds import KINDS, GraphKind
from .runs import GraphCounts, Run, counts_of
from .texts import text_of

_WRITERS = "bridge-cg compare, bench_step.py and bench_recipe.py"
_NEEDED = {"case": str, "mode": str, "versions": dict}
_SERIES = ("losses", "grad_norms", "step_ms")
_TEXTS = ("error", "wrong", "gpu", "date", "command")
_FIGURES = ("samples_per_s", "images_per_s", "tokens_per_s", "tflops_per_gpu", "peak_gb")


def read_records(path: Path) -> list[Run]:
    """Return the training runs of a JSON Lines file, or of all in a folder. A folder's may have none.

    Raises:
        OptionError: A line is no record, or none is of a training run.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    runs = [run for file in files for run in _apart(_training_runs(file))]
    if not runs:
        raise OptionError.because("run", f"Cannot report {path}: it has no training runs. {_WRITERS} write them.")
    return runs


def _training_runs(path: Path) -> list[Run]:
    """Return a file's; records with an error are such runs that failed, unless there are other measurements alone."""
    lines = enumerate(text_of(path).splitlines(), 1)
    found = [_parse(path, number, line) for number, line in lines if line.strip()]
    trained = any("losses" in record for record in found) or all("error" in record for record in found)
    return [_run(record) for record in found if trained and ("losses" in record or "error" in record)]


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise _refused(path, number, f"it is no JSON: {error.msg}") from None
    if not isinstance(record, dict):
        raise _refused(path, number, "it is no JSON object")
    for name, kind in _NEEDED.items():
        if not isinstance(record.get(name), kind):
            raise _refused(path, number, f"{name!r} is missing or no {kind.__name__}")
    for name in _SERIES:
        values = record.get(name) or []
        if not isinstance(values, list) or not all(isinstance(v, int | float) for v in values):
            raise _refused(path, number, f"{name!r} is no list of numbers")
    if wrong := _wrong_field(record):
        raise _refused(path, number, wrong)
    return record


def _wrong_field(record: Mapping[str, Any]) -> str:
    """Return which of the fields that a record may lack has another form than here; empty if none."""
    for name in ("ms", *_FIGURES):
        if not isinstance(record.get(name), int | float | None):
            return f"{name!r} is no number"
    for name in _TEXTS:
        if not isinstance(record.get(name), str | None):
            return f"{name!r} is no text"
    for kind in KINDS:
        try:
            _graphs(record, kind)
        except (AttributeError, KeyError, TypeError) as error:
            return f"{kind.field!r} has no statistics of this version ({type(error).__name__}: {error})"
    return ""


def _graphs(record: Mapping[str, Any], kind: GraphKind) -> dict[str, GraphCounts]:
    statistics = record.get(kind.field)
    return {kind.name: counts_of(statistics)} if statistics else {}


def _refused(path: Path, number: int, why: str) -> OptionError:
    return OptionError.because("run", f"Cannot read {path}:{number} as a benchmark record: {why}.")


def _run(record: Mapping[str, Any]) -> Run:
    gpu = record.get("gpu") or "none"
    return Run(
        case=record["case"],
        mode=record["mode"],
        losses=_numbered(record, "losses"),
        grad_norms=_numbered(record, "grad_norms"),
        times=_numbered(record, "step_ms"),
        ms=record.get("ms"),
        **{name: record.get(name) for name in _FIGURES},
        peak_tflops=peak_tflops(gpu),
        graphs={name: counts for kind in KINDS for name, counts in _graphs(record, kind).items()},
        error=record.get("error") or "",
        wrong=record.get("wrong") or "",
        gpu="" if gpu == "none" else gpu,
        date=record.get("date") or "",
        command=record.get("command") or "",
        versions=record["versions"],
    )


def _numbered(record: Mapping[str, Any], name: str) -> tuple[tuple[int, float], ...]:
    return tuple(enumerate(map(float, record.get(name) or []), 1))


def _apart(runs: Sequence[Run]) -> list[Run]:
    """Tell apart what was measured twice, with several releases: the case takes the release's name."""
    times = Counter((run.case, run.mode) for run in runs)
    twice = {case for (case, _), count in times.items() if count > 1}
    release = "megatron-bridge"
    return [replace(r, case=f"{r.case} {r.versions.get(release)}") if r.case in twice else r for r in runs]
