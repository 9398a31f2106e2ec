"""A plan as a table and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bridge_cg_plugin.recipes import GPUS

from ..answers import Tell, named_failure, table_console
from ..gpus import other_gpu
from .errors import PlanError
from .images import VisionPlan
from .plan import PackedPlan, Percentiles

if TYPE_CHECKING:
    from rich.console import Console

EXTRA = "pip install 'bridge-cg-plugin[plan]'"


def as_json(plan: PackedPlan | VisionPlan) -> dict[str, Any]:
    """Return a plan as plain values, with the options to set."""
    return {**asdict(plan), "set": settings(plan)}


def settings(plan: PackedPlan | VisionPlan) -> dict[str, Any]:
    """Return the provider fields that a plan recommends."""
    if isinstance(plan, VisionPlan):
        return {
            "vision_cuda_graph_buckets": list(plan.buckets),
            "vision_cuda_graph_tuning.max_frames": plan.max_frames,
        }
    return {
        "cuda_graph_max_packed_seqs": plan.best.max_packed_seqs,
        "cuda_graph_packed_buckets": list(plan.best.buckets),
    }


def print_plan(plan: PackedPlan | VisionPlan, tell: Tell) -> None:
    """Print a plan by `tell`.

    Raises:
        PlanError: rich is not installed.
        AnswerError: Standard output does not take it.
    """
    try:
        console = table_console()
    except ImportError:
        raise PlanError(f"Cannot print tables without rich: {EXTRA}, or use --json.") from None
    with named_failure(), console.capture() as shown:  # which ends with a write of nothing
        _show(plan, console)
    tell(shown.get().removesuffix("\n"))


def _show(plan: PackedPlan | VisionPlan, console: "Console") -> None:
    from rich.table import Table

    sizes = Table("", "P50", "P90", "P99", "max", title=_title(plan))
    for name, values in _sizes(plan).items():
        sizes.add_row(name, *(str(v) for v in (values.p50, values.p90, values.p99, values.max)))
    console.print(sizes)
    if isinstance(plan, PackedPlan):
        table = Table("max_packed_seqs", "buckets", "time/eager", "on graphs", "padding", "GiB a slot", "eager because")
        for column in table.columns:
            column.overflow = "fold"
        for choice in plan.choices:
            found = choice.expected
            reasons = ", ".join(f"{reason} {count}" for reason, count in found.fallbacks) or "none"
            table.add_row(
                f"{choice.max_packed_seqs}{' <' if choice is plan.best else ''}",
                _listed(choice.buckets),
                _between(found.ratios),
                f"{found.on_graphs:.1%}",
                f"{found.padding:.1%}",
                "-" if choice.memory_gb is None else f"{choice.memory_gb:.1f}",
                reasons,
                style="bold" if choice is plan.best else None,
            )
        console.print(table)
        found = plan.best.expected
    else:
        found = plan.expected
        memory = "" if plan.memory_gb is None else f", {plan.memory_gb:.1f} GiB a slot"
        console.print(
            f"buckets {_listed(plan.buckets)}: {found.on_graphs:.1%} on graphs, {found.padding:.1%} padding{memory}"
        )
    console.print(f"expected time over eager, by measured ratios: {_between(found.ratios)}")
    console.print(f"measured: {plan.origin}")
    if isinstance(plan, VisionPlan) and plan.gpu is not None:
        console.print(_of_gpu(plan.gpu, plan.origin))
    for name, value in settings(plan).items():
        console.print(f"model.{name}={value}".replace(" ", ""), highlight=False, markup=False, soft_wrap=True)


def _of_gpu(gpu: str, origin: str) -> str:
    limit = f"--gpu {gpu}: buckets of up to {GPUS[gpu]} patches, as with --graphs {gpu}; larger microbatches run eager"
    return limit + (f". The records are not of {gpu}: its ratios may differ" if other_gpu(origin, gpu) else "")


def _title(plan: PackedPlan | VisionPlan) -> str:
    return f"{plan.packs} packs" if isinstance(plan, PackedPlan) else f"{plan.microbatches} microbatches"


def _sizes(plan: PackedPlan | VisionPlan) -> dict[str, Percentiles]:
    if isinstance(plan, VisionPlan):
        return {"patches": plan.tokens, "frames": plan.frames, "largest frame": plan.largest}
    return {"documents": plan.documents, "tokens": plan.tokens, "longest document": plan.longest}


def _between(ratios: tuple[float, float]) -> str:
    least, greatest = (f"{ratio:.2f}" for ratio in ratios)
    return least if least == greatest else f"{least}-{greatest}"


def _listed(buckets: Sequence[int]) -> str:
    return ", ".join(map(str, buckets))
