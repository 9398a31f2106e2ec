"""A run from the TensorBoard event files of Bridge's trainer, with the plugin's scalars."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge_cg_plugin.options import OptionError

from .kinds import KINDS
from .runs import GIB, WARM_UP, GraphCounts, Run

Series = tuple[tuple[int, float], ...]
EVENT_FILES = "**/*tfevents*"
_PREFIXES = {kind.name: f"{kind.group}/" for kind in KINDS}
_PEAK = "memory/mem-max-allocated-gigabytes"
_GB = 1e9


def read_events(folder: Path) -> Run:
    """Return the run that a folder's event files are of, those of its subfolders included.

    Raises:
        OptionError: The tensorboard package is missing, or the files have no loss.
    """
    scalars = _scalars(folder)
    losses = scalars.get(_loss_tag(scalars), ())
    if not losses:
        advice = "Train with logger.tensorboard_dir set; logger.tensorboard_log_interval says how often."
        raise OptionError.because("run", f"Cannot report {folder}: its event files have no loss. {advice}")
    return Run(
        case="run",
        mode=folder.resolve().name,
        losses=losses,
        grad_norms=scalars.get("grad-norm", ()),
        times=tuple((step, 1e3 * seconds) for step, seconds in scalars.get("iteration-time", ())),
        samples_per_s=_mean(scalars, "throughput/samples_per_sec"),
        tokens_per_s=_mean(scalars, "throughput/tokens_per_sec"),
        tflops_per_gpu=_mean(scalars, "throughput/tflops/device"),
        peak_gb=max((value * _GB / GIB for _, value in scalars.get(_PEAK, ())), default=None),
        graphs={title: _counts(scalars, p) for title, p in _PREFIXES.items() if f"{p}replays" in scalars},
    )


def _scalars(folder: Path) -> dict[str, Series]:
    """Return every scalar's (step, value); of what a resumed run wrote twice, the later value."""
    found: dict[str, dict[int, float]] = {}
    for part in sorted({path.parent for path in folder.glob(EVENT_FILES)}):
        events = _accumulator(part)
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return {tag: tuple(sorted(values.items())) for tag, values in found.items()}


def _accumulator(folder: Path) -> Any:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ModuleNotFoundError as error:
        why = f"tensorboard is not installed ({error}). Install it: pip install tensorboard."
        raise OptionError.because("run", f"Cannot read {folder}: {why}") from None
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: all of them
    events.Reload()
    return events


def _loss_tag(scalars: Mapping[str, Series]) -> str:
    losses = [tag for tag in scalars if "loss" in tag and tag != "loss-scale" and "validation" not in tag]
    losses = [tag for tag in losses if not tag.endswith(" vs samples")]
    return "lm loss" if "lm loss" in losses else (losses or [""])[0]


def _mean(scalars: Mapping[str, Series], tag: str) -> float | None:
    """Return a figure's mean over what was logged after warm-up."""
    values = [value for step, value in scalars.get(tag, ()) if step > WARM_UP]
    return sum(values) / len(values) if values else None


def _counts(scalars: Mapping[str, Series], prefix: str) -> GraphCounts:
    reasons = f"{prefix}fallback/"
    return GraphCounts(
        replays=int(scalars[f"{prefix}replays"][-1][1]),
        fallbacks={tag.removeprefix(reasons): int(s[-1][1]) for tag, s in scalars.items() if tag.startswith(reasons)},
        padding_share=_last(scalars, f"{prefix}padding_share"),
        memory_gb=_last(scalars, f"{prefix}memory_gb"),
    )


def _last(scalars: Mapping[str, Series], tag: str) -> float | None:
    return scalars[tag][-1][1] if tag in scalars else None
