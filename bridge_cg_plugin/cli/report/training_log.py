"""A run from the log of Bridge's training loop: its lines of steps, and the plugin's report at the end."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bridge_cg_plugin.options import OptionError

from .page import text_of
from .runs import GIB, KINDS, BucketCounts, GraphCounts, Run

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf)"
_STEP = re.compile(r"iteration\s+(\d+)/\s*\d+ \|(.*)")
_PAIR = re.compile(rf"\s*([^|:]+?)\s*(?:\([^)|]*\))?:\s*({_NUMBER})\s*(?:\||$)")
_UTILIZATION = re.compile(rf"GPU utilization: ({_NUMBER})MODEL_TFLOP/s/GPU")
_MEMORY = re.compile(rf"mem-max-allocated-gigabytes: ({_NUMBER})")
_MARK = "[bridge-cg] "
_TITLES = {kind.title: kind.name for kind in KINDS}
_BUCKET = re.compile(rf"\s*(\S+)\s+(\d+)\s+(\d+)\s+({_NUMBER})%$")
_REASON = re.compile(r"(\w+) (\d+)")
# Bridge's gigabytes.
_GB = 1e9


def read_log(path: Path) -> Run:
    """Return the run that a log file is of.

    Raises:
        OptionError: It has no line of a step.
    """
    lines = text_of(path, errors="replace").splitlines()
    steps = [(int(found[1]), dict(_pairs(found[2]))) for found in map(_STEP.search, lines) if found]
    if not steps:
        why = "it has no lines `iteration N/ M | ...` of Bridge's training loop"
        raise OptionError.because("run", f"Cannot report {path}: {why}. Give the output of the rank that logs.")
    return Run(
        case="run",
        mode=path.stem,
        losses=_column(steps, _loss_name(steps)),
        grad_norms=_column(steps, "grad norm"),
        times=_column(steps, "elapsed time per iteration"),
        samples_per_s=_samples_per_s(steps),
        tflops_per_gpu=_tflops(steps, lines),
        peak_gb=_peak(lines),
        graphs=read_graphs(line.partition(_MARK)[2] for line in lines if _MARK in line),
    )


def _pairs(text: str) -> Iterable[tuple[str, float]]:
    # Each value ends with the bar before the next name.
    for part in text.split("|"):
        found = _PAIR.fullmatch(part)
        if found:
            yield found[1].strip(), float(found[2])


def _loss_name(steps: Sequence[tuple[int, dict[str, float]]]) -> str:
    names = dict.fromkeys(name for _, values in steps for name in values)
    losses = [name for name in names if "loss" in name and name != "loss scale"]
    return "lm loss" if "lm loss" in losses else (losses or [""])[0]


def _column(steps: Sequence[tuple[int, dict[str, float]]], name: str) -> tuple[tuple[int, float], ...]:
    return tuple((step, values[name]) for step, values in steps if name in values)


def _samples_per_s(steps: Sequence[tuple[int, dict[str, float]]]) -> float | None:
    """Return samples over seconds of all logged intervals but the first, which warm-up and capture are part of."""
    later = [values for _, values in steps[1:] if {"global batch size", "elapsed time per iteration"} <= values.keys()]
    seconds = sum(values["elapsed time per iteration"] for values in later) / 1e3
    return sum(values["global batch size"] for values in later) / seconds if seconds else None


def _tflops(steps: Sequence[tuple[int, dict[str, float]]], lines: Sequence[str]) -> float | None:
    found = [values["throughput per GPU"] for _, values in steps if "throughput per GPU" in values]
    found = found or [float(match[1]) for match in map(_UTILIZATION.search, lines) if match]
    return max(found, default=None) if len(found) < 2 else sum(found[1:]) / len(found[1:])


def _peak(lines: Sequence[str]) -> float | None:
    found = [float(match[1]) * _GB / GIB for match in map(_MEMORY.search, lines) if match]
    return max(found, default=None)


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
    return {title: _counts(block) for title, block in blocks.items()}


def _counts(block: Sequence[str]) -> GraphCounts:
    text = "\n".join(block)
    buckets = [
        BucketCounts(
            name=found[1],
            replays=int(found[2]),
            evaluations=int(found[3]),
            padding_share=float(found[4]) / 100,
        )
        for found in map(_BUCKET.fullmatch, block)
        if found
    ]
    fallbacks = re.search(r"eager fallbacks: (.*)", text)
    return GraphCounts(
        replays=sum(b.replays + b.evaluations for b in buckets),
        fallbacks={name: int(count) for name, count in _REASON.findall(fallbacks[1] if fallbacks else "")},
        padding_share=_share(_first(rf"padding over all replays: ({_NUMBER})%", text)),
        memory_gb=_first(rf"({_NUMBER}) GiB of device memory", text),
        capture_s=_first(rf"captured in ({_NUMBER}) s", text),
        warmup_microbatches=_whole(_first(r"warm-up microbatches: (\d+)", text)),
        buckets=tuple(buckets),
        unused_buckets=_whole(_first(r"buckets not used: (\d+)", text)),
    )


def _first(pattern: str, text: str) -> float | None:
    found = re.search(pattern, text)
    return float(found[1]) if found else None


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
