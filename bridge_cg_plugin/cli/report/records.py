"""Runs from benchmark records; docs/benchmarks/format.md has their fields."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge_cg_plugin.options import OptionError

from .page import text_of
from .runs import EVENT_FILES, KINDS, GraphCounts, GraphKind, Run, counts_of, read_events
from .training_log import read_log

# Part of a GPU's name -> dense bf16 TFLOP/s of its SXM form, from its vendor's data sheet.
PEAK_TFLOPS = {"B300": 2250.0, "B200": 2250.0, "H200": 989.4, "H100": 989.4, "A100": 312.0}


def peak_tflops(name: str) -> float | None:
    """Return dense bf16 TFLOP/s of the GPU that PyTorch calls `name`; None for one that is not known."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name and "PCIe" not in name), None)


_WRITERS = "bridge-cg compare, bench_step.py and bench_recipe.py"
_NEEDED = {"case": str, "mode": str, "versions": dict}
_SERIES = ("losses", "grad_norms", "step_ms")
_TEXTS = ("error", "wrong", "gpu", "date", "command")
_FIGURES = ("samples_per_s", "images_per_s", "tokens_per_s", "tflops_per_gpu", "peak_gb")


def runs_in(path: Path) -> list[Run]:
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


_NAMED = re.compile(r"([A-Za-z][\w.+-]*)=(.+)", re.DOTALL)
_NAMES = (
    "Give eager runs the modes eager1, eager2, ..., the graphed one plugin: eager1=a.log eager2=b.log plugin=c.log."
)


def read_runs(words: Sequence[str], peak_tflops: float | None = None) -> list[Run]:
    """Return the runs of all inputs.

    Args:
        words: Paths, each alone or as MODE=PATH, which names the run.
        peak_tflops: Dense bf16 TFLOP/s of one GPU, for runs whose source does not name it.

    Raises:
        OptionError: An input is missing or cannot be read, or two runs have one name.
    """
    runs = [run for word in words for run in _read(word)]
    seen: set[tuple[str, str]] = set()
    for run in runs:
        if (run.case, run.mode) in seen:
            raise OptionError.because("run", f"Cannot compare two runs that are both named {run.mode}. {_NAMES}")
        seen.add((run.case, run.mode))
    return [replace(run, peak_tflops=run.peak_tflops or peak_tflops) for run in runs]


def _read(word: str) -> list[Run]:
    named = None if Path(word).exists() else _NAMED.fullmatch(word)
    mode, path = (named[1], Path(named[2])) if named else (None, Path(word))
    if not path.exists():
        raise OptionError.because("run", f"Cannot read {word}: it does not exist. Write PATH or MODE=PATH.")
    runs = _runs_at(path)
    if mode is None:
        return runs
    if len(runs) > 1:
        raise OptionError.because("run", f"Cannot use {word}: the file has {len(runs)} runs. Write PATH alone.")
    return [runs[0].named(mode)]


def _runs_at(path: Path) -> list[Run]:
    if path.is_file():
        return runs_in(path) if path.suffix == ".jsonl" else [read_log(path)]
    if any(path.glob(EVENT_FILES)):
        return [read_events(path)]
    if any(path.glob("*.jsonl")):
        return runs_in(path)
    raise OptionError.because(
        "run",
        f"Cannot read {path}: it has no TensorBoard event files and no .jsonl records. Name the file or its folder.",
    )
