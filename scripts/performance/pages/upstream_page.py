"""The tables and the picture of docs/upstream_graphs.md, from the records."""

from pathlib import Path

from bridge_cg_plugin.cli.runs.results import loss_distance, read_records, same_steps
from scripts.performance.models.workloads import CASES
from scripts.performance.pages.markdown import Records, by_case, number, picture, table, with_origin
from scripts.performance.pages.performance_page import IMAGES


def encoder(records: Records) -> str:
    """Return how far upstream's and the plugin's outputs and gradients are from eager's, with their origin."""
    upstream, plugin = by_case(records, "upstream"), by_case(records, "plugin")
    rows, shown = [], []
    for case in (case for case in CASES if case in upstream and case in plugin):
        theirs, ours = upstream[case], plugin[case]
        shown += [theirs, ours]
        outputs = "0" if ours.get("bit_equal") else number(ours, "forward_rel", ".0e")
        rows.append(
            [IMAGES[case], number(theirs, "forward_rel", ".2f"), outputs, number(theirs, "grad_rel", ".2f")]
            + [number(ours, "grad_rel", ".3f"), number(ours, "grad_noise", ".3f")]
        )
    header = ["images", "outputs, upstream", "plugin", "gradients, upstream", "plugin", "two eager runs"]
    return with_origin(table(header, rows), shown) if rows else ""


def training(records: Records) -> str:
    """Return how far losses are from eager's, in the first step and at most, with their origin."""
    eager, upstream, plugin = (by_case(records, mode) for mode in ("eager", "upstream", "plugin"))
    rows, shown = [], []
    for case in (case for case in upstream if case in eager and case in plugin):
        losses = [mode[case]["losses"] for mode in (eager, upstream, plugin)]
        if not same_steps(losses):
            continue
        images, _, model = case.partition("_")
        shown += [upstream[case], plugin[case]]
        distances = [loss_distance(each[:1], losses[0][:1]) for each in losses[1:]]
        distances += [loss_distance(each, losses[0]) for each in losses[1:]]
        rows.append([images, model, len(losses[0]), *(f"{distance:.0e}" for distance in distances)])
    header = ["images", "language model", "steps", "first loss, upstream", "plugin", "largest, upstream", "plugin"]
    return with_origin(table(header, rows), shown) if rows else ""


def upstream_parts(folder: Path) -> dict[str, str]:
    """Return the page's parts by the names of their marks.

    Args:
        folder: With the records.
    """
    bench, steps = (read_records(folder / f"{name}.jsonl") for name in ("vision_bench", "steps"))
    return {
        "upstream": encoder(bench),
        "losses": picture(folder, "losses.svg", "losses of eager, upstream's graphs and the plugin", "benchmarks/"),
        "upstream-training": training(steps),
    }
