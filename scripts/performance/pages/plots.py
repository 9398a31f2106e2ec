"""Plots that are drawn from records. Needs matplotlib."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from bridge_cg_plugin.cli.report.plots import style
from bridge_cg_plugin.cli.runs.results import ROOT, read_records, same_steps
from scripts.performance.measuring.step_times import IDLE, PARTS
from scripts.performance.models.workloads import CASES, frames_of
from scripts.performance.offload.bench import PACKS, SLOTS
from scripts.performance.pages.markdown import by_case
from scripts.performance.pages.performance_page import by_default
from scripts.performance.pages.whole_step_page import limit_of, mode_in_words, shown

matplotlib.use("svg")

FOLDER = ROOT / "docs/benchmarks"
Records = Sequence[dict[str, Any]]
# Grey and colours that are readable on white and on black alike; the background is transparent.
GREY = "#808890"
NAMES = {
    "eager": "eager",
    "upstream": "upstream's graphs (wrong result)",
    "compile": "torch.compile",
    "compile_reduce_overhead": "torch.compile, reduce-overhead",
    "plugin": "plugin",
    "plugin_te_attention": "plugin, Transformer Engine's attention",
    "plugin_fast": "plugin, fast kernels",
    "plugin_streams": "plugin, fast kernels on two streams",
    "plugin_flash": "plugin, fast kernels and FlashAttention",
    "plugin_flash_streams": "plugin, fast kernels and FlashAttention on two streams",
    "plugin_language_model": "plugin, language model's layers on graphs too",
    "plugin_full_iteration": "plugin, full_iteration",
    "limit": "arithmetic at 700 TFLOP/s",
}
COLOURS = {
    "eager": "#d97706",
    "upstream": "#e11d48",
    "compile": "#9333ea",
    "compile_reduce_overhead": "#c026d3",
    "plugin": "#2f81f7",
    "plugin_te_attention": "#0891b2",
    "plugin_fast": "#0d9488",
    "plugin_streams": "#9333ea",
    "plugin_flash": "#65a30d",
    "plugin_flash_streams": "#ca8a04",
    "plugin_language_model": "#0d9488",
    "plugin_full_iteration": "#65a30d",
    "limit": GREY,
}
FAMILY_COLOURS = (
    *("#2f81f7", "#d97706", "#e11d48", "#0d9488", "#9333ea", "#ca8a04", "#65a30d"),
    *("#c026d3", "#64748b", "#0891b2", GREY),
)
# Training whose losses are drawn: microbatches of one to three images.
LOSS_CASE, LOSS_MODES = "mixed_4x2048", ("eager", "upstream", "plugin")
# How modes with a memory target are called.
MIX = "mixed_"
STYLE: Any = {**style(GREY), "svg.hashsalt": "bridge-cg", "font.size": 10, "grid.alpha": 0.25}


def measured(records: Records) -> list[dict[str, Any]]:
    """Return the records that have a time."""
    return [r for r in records if r.get("ms") is not None and "error" not in r]


def of_one_image(record: dict[str, Any]) -> bool:
    """Whether a record is of a single image, so that only its tokens matter."""
    grid = CASES.get(record["case"])
    return record["images"] == 1 and (grid is None or frames_of(grid) == 1)


def time_plot(axes: Axes, records: Records) -> bool:
    """Draw time against tokens, single images: eager, upstream's graphs, and the plugin with default options."""
    compared = [r for r in records if r["mode"] in ("eager", "upstream", "limit")]
    default = {**by_case(list(records), "plugin_fast"), **{r["case"]: r for r in by_default(list(records))}}
    drawn = [*compared, *({**r, "mode": "plugin"} for r in default.values())]
    return _lines(axes, drawn, lambda r, limits: r["ms"], "forward plus backward, ms", logarithmic=True)


def share_plot(axes: Axes, records: Records) -> bool:
    """Draw which part of each mode's time arithmetic alone would take."""

    def share(record: dict[str, Any], limits: dict[int, float]) -> float | None:
        limit = limits.get(record["tokens"])
        return None if limit is None or record["mode"] == "limit" else 100 * limit / record["ms"]

    axes.axhline(100, color=COLOURS["limit"], linestyle="--", linewidth=1)
    return _lines(axes, records, share, "arithmetic limit over time, %")


def _lines(
    axes: Axes,
    records: Records,
    value: Callable[[dict[str, Any], dict[int, float]], float | None],
    label: str,
    logarithmic: bool = False,
) -> bool:
    single = sorted(filter(of_one_image, measured(records)), key=lambda r: r["tokens"])
    limits = {r["tokens"]: r["ms"] for r in single if r["mode"] == "limit"}
    drawn = False
    for mode in NAMES:
        found = [(r["tokens"], value(r, limits)) for r in single if r["mode"] == mode]
        points = [(tokens, y) for tokens, y in found if y is not None]
        if not points:
            continue
        dashed = {"linestyle": "--", "marker": ""} if mode == "limit" else {"marker": "o", "markersize": 3.5}
        axes.plot(*zip(*points, strict=True), label=NAMES[mode], color=COLOURS[mode], linewidth=1.6, **dashed)
        drawn = True
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens (patches) of one image")
    axes.set_ylabel(label)
    axes.grid(True, which="major")
    if drawn:
        axes.legend(fontsize=8)
    return drawn


def family_plot(axes: Axes, records: Records) -> bool:
    """Draw where the GPU time goes: families of kernels as shares of the whole time, a bar for each case and mode."""
    found = [r for r in measured(records) if r.get("families")]
    if not found:
        return False
    cases = [case for case in CASES if any(r["case"] == case for r in found)]
    bars = [r for case in cases for mode in NAMES for r in found if (r["case"], r["mode"]) == (case, mode)]
    busy = [sum(r["families"].values()) for r in bars]
    totals: dict[str, float] = {}
    for r, whole in zip(bars, busy, strict=True):
        for name, ms in r["families"].items():
            totals[name] = totals.get(name, 0.0) + ms / whole
    left = [0.0] * len(bars)
    places = list(range(len(bars)))[::-1]
    for index, name in enumerate(sorted(totals, key=totals.__getitem__, reverse=True)):
        shares = [100 * r["families"].get(name, 0.0) / r["ms"] for r in bars]
        axes.barh(places, shares, left=left, label=name, color=FAMILY_COLOURS[index % len(FAMILY_COLOURS)])
        left = [a + b for a, b in zip(left, shares, strict=True)]
    for place, end, r in zip(places, left, bars, strict=True):
        axes.text(min(end, 100) + 1, place, f"{r['ms']:.1f} ms", va="center", fontsize=8)
    axes.set_yticks(places, [f"{r['case']}, {NAMES[r['mode']]}" for r in bars], fontsize=8)
    axes.set_xlim(0, 118)
    axes.set_xlabel("share of the time of forward plus backward, %; the rest the GPU is idle")
    axes.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    return True


def step_plot(axes: Axes, records: Records) -> bool:
    """Draw whole optimizer steps, a group of bars for each case."""
    found = measured(records)
    cases = list(dict.fromkeys(r["case"] for r in found))
    modes = [mode for mode in NAMES if any(r["mode"] == mode for r in found)]
    if not found:
        return False
    width = 0.8 / len(modes)
    for index, mode in enumerate(modes):
        by_case = {r["case"]: r["ms"] for r in found if r["mode"] == mode}
        places = [place + (index - (len(modes) - 1) / 2) * width for place, case in enumerate(cases) if case in by_case]
        heights = [by_case[case] for case in cases if case in by_case]
        bars = axes.bar(places, heights, width * 0.92, label=NAMES[mode], color=COLOURS[mode])
        axes.bar_label(bars, fmt="%.0f", fontsize=7, color=GREY, rotation=90, padding=2)
    axes.set_xticks(range(len(cases)), [case.replace("_", "\n") for case in cases], fontsize=8)
    axes.set_ylabel("optimizer step of 4 microbatches, ms")
    axes.legend(fontsize=8)
    return True


def loss_plot(axes: Axes, records: Records) -> bool:
    """Draw the losses of training on microbatches of several images, and below them how far they are from eager's."""
    found = {r["mode"]: r["losses"] for r in measured(records) if r["case"] == LOSS_CASE and r["mode"] in LOSS_MODES}
    eager = found.get("eager")
    if eager is None or len(found) < len(LOSS_MODES) or not same_steps(found.values()):
        return False
    steps = range(1, len(eager) + 1)
    figure = pyplot.gcf()
    axes.remove()
    curves, apart = figure.subplots(2, 1, sharex=True)
    for mode in LOSS_MODES:
        line = {"color": COLOURS[mode], "linewidth": 1.6, "linestyle": "--" if mode == "plugin" else "-"}
        curves.plot(steps, found[mode], label=NAMES[mode], **line)
        if mode != "eager":
            distances = [abs(a - b) / b for a, b in zip(found[mode], eager, strict=True)]
            apart.plot(steps, [d or None for d in distances], marker="o", markersize=3.5, **line)
    curves.set_ylabel("loss")
    curves.legend(fontsize=8)
    apart.set_yscale("log")
    apart.set_ylabel("from eager's, relative")
    apart.set_xlabel("optimizer step")
    for each in (curves, apart):
        each.grid(True, which="major")
    return True


def memory_plot(axes: Axes, records: Records) -> bool:
    """Draw device memory against time, both over those of a graph that keeps all activations; a line for each case.

    Cases of parts of layers are left out: what runs eager beside them decides their time.
    """
    found = [r for r in measured(records) if r["case"] in SLOTS]
    for index, case in enumerate(dict.fromkeys(r["case"] for r in found)):
        of_case = [r for r in found if r["case"] == case]
        slots, colour = of_case[0]["slots"], FAMILY_COLOURS[index]
        named = f"{of_case[0]['tokens']} tokens" + (f", {slots} slots" if slots > 1 else "")
        named += " of documents, experts" if case in PACKS else ""
        chosen = sorted((r for r in of_case if r["mode"].startswith(MIX)), key=lambda r: r["memory_ratio"])
        line = [(100 * r["memory_ratio"], 100 * r["ratio"]) for r in [*chosen, of_case[0]]]
        axes.plot(*zip(*line, strict=True), label=f"{named}: memory targets", color=colour, marker="o", markersize=3.5)
        for r in (r for r in of_case[1:] if not r["mode"].startswith(MIX)):
            x, y = 100 * r["memory_ratio"], 100 * r["ratio"]
            axes.plot([x], [y], color=colour, marker="s", markersize=5, linestyle="")
            axes.annotate(r["mode"], (x, y), textcoords="offset points", xytext=(6, 4), fontsize=8, color=colour)
    axes.axhline(108, color=GREY, linestyle="--", linewidth=1)
    axes.axvline(40, color=GREY, linestyle="--", linewidth=1)
    axes.set_xlabel("device memory of the graphs, % of that with all activations kept")
    axes.set_ylabel("forward plus backward, %")
    axes.set_xlim(0, 105)
    axes.grid(True, which="major")
    if found:
        axes.legend(fontsize=8)
    return bool(found)


def parts_plot(axes: Axes, records: Records) -> bool:
    """Draw the parts of profiled steps, a bar for each case and mode, and one for each case's arithmetic."""
    found = [r for r in shown(list(records)) if "parts_ms" in r]
    bars = []
    for case in dict.fromkeys(r["case"] for r in found):
        runs = [r for r in found if r["case"] == case]
        bars += [(f"{case}, {mode_in_words(r)}", r["parts_ms"]) for r in runs]
        bars.append((f"{case}, {NAMES['limit']}", limit_of(runs[-1])))
    places = list(range(len(bars)))[::-1]
    left = [0.0] * len(bars)
    for part, colour in zip(PARTS, FAMILY_COLOURS, strict=False):
        widths = [ms.get(part, 0.0) for _, ms in bars]
        axes.barh(places, widths, left=left, label=part, color=GREY if part == IDLE else colour)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, end in zip(places, left, strict=True):
        axes.text(end, place, f" {end:.0f} ms", va="center", fontsize=8)
    axes.set_yticks(places, [name for name, _ in bars], fontsize=8)
    axes.set_xlabel("step, ms")
    axes.margins(x=0.12)
    if found:
        axes.legend(fontsize=8, ncols=len(PARTS), loc="lower center", bbox_to_anchor=(0.4, 1.0))
    return bool(found)


# File -> (records, how it is drawn, size in inches).
PLOTS: dict[str, tuple[str, Callable[[Axes, Records], bool], tuple[float, float]]] = {
    "time.svg": ("vision_bench.jsonl", time_plot, (7.5, 3.4)),
    "limit.svg": ("vision_bench.jsonl", share_plot, (7.5, 4.2)),
    "families.svg": ("vision_profile.jsonl", family_plot, (8.5, 6.5)),
    "memory.svg": ("offload.jsonl", memory_plot, (7.5, 4.8)),
    "losses.svg": ("steps.jsonl", loss_plot, (7.5, 5.2)),
    "steps.svg": ("steps.jsonl", step_plot, (8.5, 4.5)),
    "whole_step.svg": ("whole_step.jsonl", parts_plot, (8.5, 4.5)),
}


def draw(folder: Path) -> list[Path]:
    """Draw every plot that the folder has records for; returns what was written."""
    written = []
    for name, (source, plot, size) in PLOTS.items():
        records = read_records(folder / source)
        with pyplot.rc_context(STYLE):
            figure, axes = pyplot.subplots(figsize=size, layout="constrained")
            if plot(axes, records):
                figure.savefig(folder / name, metadata={"Date": None, "Creator": None})
                written.append(folder / name)
            pyplot.close(figure)
    return written
