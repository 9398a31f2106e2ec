"""The plots of a page as SVG. Needs matplotlib."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge_cg_plugin.options import OptionError

from .page import Page
from .runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Stands for the page's own text colour, which follows light and dark.
INK = "#010203"
EAGER = ("#8a919a", "#b08d57", "#7a9e87")
OTHERS = ("#2f81f7", "#e11d48", "#0d9488", "#9333ea", "#d97706", "#65a30d")
SIZE = (4.5, 3.1)


def style(ink: str) -> dict[str, Any]:
    """Return matplotlib's settings for plots on any ground: no background, text and axes in one colour."""
    return {
        "svg.fonttype": "none",
        "font.size": 8.5,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink),
        "grid.color": ink,
        "grid.alpha": 0.15,
    }


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot.

    Attributes:
        title: What it shows.
        svg: The `<svg>` element; what is neither a line nor a bar has the colour of the text around it.
    """

    title: str
    svg: str


def draw(page: Page) -> list[Plot]:
    """Return the plots that the page's runs have figures for.

    Raises:
        OptionError: matplotlib is not installed.
    """
    cases = list(dict.fromkeys(run.case for run in page.runs if not run.error))
    drawn: list[Plot] = []
    for case in cases:
        runs = [run for run in page.runs if run.case == case and not run.error]
        for title, paint in PLOTS.items():
            plot = _plot(f"p{len(drawn)}", title if len(cases) == 1 else f"{title}, {case}", paint, runs)
            drawn += [plot] if plot is not None else []
    return drawn


def _plot(name: str, title: str, paint: Callable[["Axes", Sequence[Run]], bool], runs: Sequence[Run]) -> Plot | None:
    matplotlib = require()
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**style(INK), "svg.hashsalt": name}):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        if not paint(figure.add_subplot(), runs):
            return None
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return Plot(title, _embedded(out.getvalue(), name, title))


def require() -> Any:
    """Return the matplotlib package.

    Raises:
        OptionError: It is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        why = f"matplotlib is not installed ({error}). Install it: pip install 'bridge-cg-plugin[report]'."
        raise OptionError.because("html", f"Cannot draw plots: {why}") from None
    return matplotlib


def _embedded(text: str, name: str, title: str) -> str:
    """Return a file's `<svg>` element for a page with other ones: names of its own, the page's text colour."""
    svg = text[text.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'xlink:href="#', f'xlink:href="#{name}-', svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, _, rest = svg.partition(">")
    head = re.sub(r'\s(?:width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{title}">{rest}'


def colours(runs: Sequence[Run]) -> list[str]:
    """Return a colour for every run: eager ones muted, the others apart from each other."""
    eager = others = 0
    found = []
    for run in runs:
        palette, index = (EAGER, eager) if run.is_eager else (OTHERS, others)
        found.append(palette[index % len(palette)])
        eager, others = eager + run.is_eager, others + (not run.is_eager)
    return found


def _lines(
    axes: "Axes",
    runs: Sequence[Run],
    points: Callable[[Run], Sequence[tuple[int, float]]],
    name: str,
    log: bool = False,
) -> bool:
    from matplotlib.ticker import FormatStrFormatter, LogFormatter, MaxNLocator

    for run, colour in zip(runs, colours(runs), strict=True):
        found = points(run)
        if found:
            marker = "o" if len(found) < 3 else ""
            width, style = (1.2, "-") if run.is_eager else (1.6, "--")
            axes.plot(
                *zip(*found, strict=True),
                label=run.mode,
                color=colour,
                linewidth=width,
                linestyle=style,
                marker=marker,
            )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(name)
    axes.grid(True)
    if not axes.lines:
        return False
    if log and all(value > 0 for run in runs for _, value in points(run)):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))  # labels where there is room
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=7.5)
    return True


def _differences(axes: "Axes", runs: Sequence[Run]) -> bool:
    first = {run.case: dict(run.losses) for run in reversed(runs) if run.is_eager and run.losses}

    def points(run: Run) -> list[tuple[int, float]]:
        base = first.get(run.case, {})
        return [(step, loss - base[step]) for step, loss in run.losses if step in base]

    return _lines(axes, runs, points, "difference of the loss") and len(axes.lines) > 1


def _distribution(axes: "Axes", runs: Sequence[Run]) -> bool:
    for run, colour in zip(runs, colours(runs), strict=True):
        times = sorted(run.settled_ms)
        if len(times) > 1:
            shares = [100 * (i + 1) / len(times) for i in range(len(times))]
            style = "-" if run.is_eager else "--"
            axes.step(times, shares, where="post", label=run.mode, color=colour, linestyle=style)
    axes.set_xlabel("milliseconds of a step, after warm-up")
    axes.set_ylabel("steps, %")
    axes.set_ylim(0, 103)
    axes.grid(True)
    if axes.lines:
        axes.legend(fontsize=7.5)
    return bool(axes.lines)


MOST_BARS = 24


def _buckets(axes: "Axes", runs: Sequence[Run]) -> bool:
    """Draw the most used buckets of the last run that has any."""
    with_buckets = [(run, counts) for run in runs for counts in run.graphs.values() if counts.buckets]
    if not with_buckets:
        return False
    run, counts = with_buckets[-1]
    used = sorted(counts.buckets, key=lambda b: b.replays + b.evaluations)[-MOST_BARS:]
    shown = [b for b in counts.buckets if b in used]
    replays = [b.replays + b.evaluations for b in shown]
    padding = [n * b.padding_share for n, b in zip(replays, shown, strict=True)]
    places = list(range(len(shown)))
    axes.barh(places, replays, color=OTHERS[0], label="replays")
    axes.barh(places, padding, color=OTHERS[4], label="of which padding")
    axes.set_yticks(places, [b.name for b in shown], fontsize=7 if len(shown) > 12 else 8)
    axes.invert_yaxis()
    axes.set_xlabel(f"replays, {run.mode}")
    axes.set_ylabel("bucket")
    axes.legend(fontsize=7.5, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0))  # bars may fill the axes
    return True


PLOTS: dict[str, Callable[["Axes", Sequence[Run]], bool]] = {
    "Losses": lambda axes, runs: _lines(axes, runs, lambda r: r.losses, "loss"),
    "Losses less the first eager run's": _differences,
    "Gradient norms": lambda axes, runs: _lines(axes, runs, lambda r: r.grad_norms, "gradient norm", log=True),
    "Step times": lambda axes, runs: _lines(axes, runs, lambda r: r.times, "milliseconds of a step", log=True),
    "Share of steps by step time": _distribution,
    "Replays and padding per bucket": _buckets,
}
