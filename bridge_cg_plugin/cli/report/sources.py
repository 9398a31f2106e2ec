"""What a command line names as runs: a file of records, a folder of event files, a log."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bridge_cg_plugin.options import OptionError

from .events import EVENT_FILES, read_events
from .records import read_records
from .runs import Run
from .training_log import read_log

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
        return read_records(path) if path.suffix == ".jsonl" else [read_log(path)]
    if any(path.glob(EVENT_FILES)):
        return [read_events(path)]
    if any(path.glob("*.jsonl")):
        return read_records(path)
    raise OptionError.because(
        "run",
        f"Cannot read {path}: it has no TensorBoard event files and no .jsonl records. Name the file or its folder.",
    )
