"""Where runs are read from: benchmark records, and logs of Bridge's training loop.

docs/benchmarks/format.md has the fields of records.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge_cg_plugin.options import OptionError

from .runs import GIB, KINDS, GraphCounts, Run, Series, counts_of

# Bridge's gigabytes.
_GB = 1e9
_NAMED = re.compile(r"([A-Za-z][\w.+-]*)=(.+)", re.DOTALL)
_NAMES = (
    "Give eager runs the modes eager1, eager2, ..., the graphed one plugin: eager1=a.log eager2=b.log plugin=c.log."
)


def read_runs(words: Sequence[str]) -> list[Run]:
    """Return the runs of all inputs.

    Args:
        words: Paths, each alone or as MODE=PATH, which names the run.

    Raises:
        OptionError: An input is missing or cannot be read, or two runs have one name.
    """
    runs = [run for word in words for run in _read(word)]
    for (_, mode), count in Counter((run.case, run.mode) for run in runs).items():
        if count > 1:
            raise _refused(f"Cannot compare two runs that are both named {mode}. {_NAMES}")
    return runs


def _refused(why: str) -> OptionError:
    return OptionError.because("run", why)


def _read(word: str) -> list[Run]:
    named = None if Path(word).exists() else _NAMED.fullmatch(word)
    mode, path = (named[1], Path(named[2])) if named else (None, Path(word))
    if not path.exists():
        raise _refused(f"Cannot read {word}: it does not exist. Write PATH or MODE=PATH.")
    if path.is_dir() and not any(path.glob("*.jsonl")):
        raise _refused(f"Cannot read {path}: it has no .jsonl records. Name a file of records or the log of a run.")
    runs = runs_in(path) if path.is_dir() or path.suffix == ".jsonl" else [read_log(path)]
    if mode is None:
        return runs
    if len(runs) > 1:
        raise _refused(f"Cannot use {word}: the file has {len(runs)} runs. Write PATH alone.")
    return [replace(runs[0], mode=mode)]


def _text_of(path: Path, errors: str = "strict") -> str:
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or f"it is no text: {error}"
        raise _refused(f"Cannot read {path}: {why}.") from None


# Records

_WRITERS = "bridge-cg compare, bench_step.py and bench_recipe.py"
_SERIES = {"losses": "losses", "grad_norms": "grad_norms", "times": "step_ms"}
_FIGURES = ("ms", "samples_per_s", "tokens_per_s", "tflops_per_gpu", "peak_gb")
_TEXTS = ("error", "wrong", "gpu", "date", "command")


def runs_in(path: Path) -> list[Run]:
    """Return the training runs of a JSON Lines file, or of all in a folder. A folder's may have none.

    Raises:
        OptionError: A line is no record, or none is of a training run.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    runs = [run for file in files for run in _apart(_training_runs(file))]
    if not runs:
        raise _refused(f"Cannot report {path}: it has no training runs. {_WRITERS} write them.")
    return runs


def _training_runs(path: Path) -> list[Run]:
    """Return a file's; records with an error are such runs that failed, unless there are other measurements alone."""
    lines = enumerate(_text_of(path).splitlines(), 1)
    found = [_parse(line, f"{path}:{number}") for number, line in lines if line.strip()]
    trained = any("losses" in record for record in found) or all("error" in record for record in found)
    return [_run(record) for record in found if trained and ("losses" in record or "error" in record)]


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        _run(record)
    except json.JSONDecodeError as error:
        raise _refused(f"Cannot read {where} as a benchmark record: it is no JSON: {error.msg}.") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        wrong = f"a field is missing or of another kind ({type(error).__name__}: {error})"
        raise _refused(f"Cannot read {where} as a benchmark record: {wrong}.") from None
    return dict(record)


def _run(record: Mapping[str, Any]) -> Run:
    series: dict[str, Any] = {
        name: tuple(enumerate(map(float, record.get(key) or []), 1)) for name, key in _SERIES.items()
    }
    figures: dict[str, Any] = {name: None if record.get(name) is None else float(record[name]) for name in _FIGURES}
    texts: dict[str, Any] = {name: record.get(name) or "" for name in _TEXTS}
    return Run(
        case=record["case"],
        mode=record["mode"],
        graphs={kind.name: counts_of(record[kind.field]) for kind in KINDS if record.get(kind.field)},
        versions=dict(record["versions"]),
        **series,
        **figures,
        **(texts | {"gpu": texts["gpu"].removeprefix("none")}),
    )


def _apart(runs: Sequence[Run]) -> list[Run]:
    """Tell apart what was measured twice, with several releases: the case takes the release's name."""
    times = Counter((run.case, run.mode) for run in runs)
    twice = {case for (case, _), count in times.items() if count > 1}
    release = "megatron-bridge"
    return [replace(r, case=f"{r.case} {r.versions.get(release)}") if r.case in twice else r for r in runs]


# Logs

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf)"
_STEP = re.compile(r"iteration\s+(\d+)/\s*\d+ \|(.*)")
_PAIR = re.compile(rf"\s*([^|:]+?)\s*(?:\([^)|]*\))?:\s*({_NUMBER})\s*(?:\||$)")
_UTILIZATION = re.compile(rf"GPU utilization: ({_NUMBER})MODEL_TFLOP/s/GPU")
_MEMORY = re.compile(rf"mem-max-allocated-gigabytes: ({_NUMBER})")
_MARK = "[bridge-cg] "
_TITLES = {kind.title: kind.name for kind in KINDS}
_BUCKET = re.compile(rf"\s*\S+\s+(\d+)\s+(\d+)\s+{_NUMBER}%$")
_BATCH, _TIME = "global batch size", "elapsed time per iteration"


def read_log(path: Path) -> Run:
    """Return the run that a log file of Bridge's training loop is of, with the plugin's report at its end.

    Raises:
        OptionError: It has no line of a step.
    """
    lines = _text_of(path, errors="replace").splitlines()
    steps = [(int(found[1]), _pairs(found[2])) for found in map(_STEP.search, lines) if found]
    if not steps:
        why = "it has no lines `iteration N/ M | ...` of Bridge's training loop"
        raise _refused(f"Cannot report {path}: {why}. Give the output of the rank that logs.")

    def column(name: str) -> Series:
        return tuple((step, values[name]) for step, values in steps if name in values)

    tflops = _figures(_UTILIZATION, lines)
    return Run(
        case="run",
        mode=path.stem,
        losses=column(_loss_of(steps)),
        grad_norms=column("grad norm"),
        times=column(_TIME),
        samples_per_s=_samples_per_s([values for _, values in steps]),
        tflops_per_gpu=sum(tflops[1:]) / len(tflops[1:]) if len(tflops) > 1 else max(tflops, default=None),
        peak_gb=max((peak * _GB / GIB for peak in _figures(_MEMORY, lines)), default=None),
        graphs=read_graphs(line.partition(_MARK)[2] for line in lines if _MARK in line),
    )


def _loss_of(steps: Sequence[tuple[int, Mapping[str, float]]]) -> str:
    names = dict.fromkeys(name for _, values in steps for name in values)
    losses = [name for name in names if "loss" in name and name != "loss scale"]
    return "lm loss" if "lm loss" in losses else (losses or [""])[0]


def _pairs(text: str) -> dict[str, float]:
    # Each value ends with the bar before the next name.
    pairs = map(_PAIR.fullmatch, text.split("|"))
    return {found[1].strip(): float(found[2]) for found in pairs if found}


def _figures(pattern: re.Pattern[str], lines: Iterable[str]) -> list[float]:
    return [float(found[1]) for found in map(pattern.search, lines) if found]


def _samples_per_s(steps: Sequence[Mapping[str, float]]) -> float | None:
    """Return samples over seconds of all logged intervals but the first, which warm-up and capture are part of."""
    later = [values for values in steps[1:] if {_BATCH, _TIME} <= values.keys()]
    seconds = sum(values[_TIME] for values in later) / 1e3
    return sum(values[_BATCH] for values in later) / seconds if seconds else None


def read_graphs(lines: Iterable[str]) -> dict[str, GraphCounts]:
    """Return what the plugin's report at the end of training says, by model.

    Args:
        lines: The plugin's lines, without their mark; others between them are no matter.
    """
    blocks: dict[str, list[str]] = {}
    current: list[str] = []
    for line in lines:
        title = _TITLES.get(line.strip())
        if title is not None:
            current = blocks[title] = []
        current.append(line)
    return {title: _reported(block) for title, block in blocks.items()}


def _reported(block: Sequence[str]) -> GraphCounts:
    text = "\n".join(block)
    used = [match.groups() for match in map(_BUCKET.fullmatch, block) if match]
    reasons = re.search(r"eager fallbacks: (.*)", text)

    def first[Value](pattern: str, kind: type[Value]) -> Value | None:
        match = re.search(pattern, text)
        return None if match is None else kind(match[1])  # type: ignore[call-arg]

    padding = first(rf"padding over all replays: ({_NUMBER})%", float)
    return GraphCounts(
        replays=sum(int(replays) + int(evaluations) for replays, evaluations in used),
        fallbacks={name: int(count) for name, count in re.findall(r"(\w+) (\d+)", reasons[1] if reasons else "")},
        padding_share=None if padding is None else padding / 100,
        memory_gb=first(rf"({_NUMBER}) GiB of device memory", float),
        capture_s=first(rf"captured in ({_NUMBER}) s", float),
        warmup_microbatches=first(r"warm-up microbatches: (\d+)", int),
    )
