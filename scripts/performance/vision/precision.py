"""How far eager and the plugin's kernels are from fp32."""

import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bridge_cg_plugin.cli.runs.results import provenance
from scripts.performance.models.workloads import Grid, description

MODES = ("eager", "plugin", "plugin_fast", "plugin_flash")
# A mode may be this much farther from fp32 than eager: two sets of eager runs differ by about as much.
ALLOWANCE = 1.02


def measure(grids: dict[str, Grid], layers: Sequence[int], repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a record of every case, number of layers and mode."""
    from scripts.performance.models import tower
    from scripts.performance.models.modes import MODES as KINDS
    from scripts.performance.models.reference import Fp32Tower

    tower.start_process()
    modes = available_modes()
    for count in layers:
        model = tower.build_tower(layers=count)
        grads = tower.MainGrads(model)
        for name, grid in grids.items():
            batches = [tower.make_batch(grid, model, seed=1 + seed) for seed in range(repeats)]
            tower.forward(model, batches[0])  # upstream makes the rotary frequencies in its first call
            reference = Fp32Tower(model)
            expected = [reference.step(batch) for batch in batches]
            names = [name for name, p in reference.parameters.items() if p.requires_grad]
            for mode in modes:
                kind = KINDS[mode]()
                with kind.on(model, grads, batches[0]) as (prepared, _):
                    found = [errors_of(prepared, grads, *pair)[1:] for pair in zip(batches, expected, strict=True)]
                yield _record(f"{name}_{count}layers", mode, grid, names, found)


def available_modes() -> tuple[str, ...]:
    """Return the modes that this machine can run; says which are left out and why."""
    from bridge_cg_plugin.upstream.encoders.direct_attention import flash_attention_refusal

    refusal = flash_attention_refusal()
    if refusal is None:
        return MODES
    print(f"plugin_flash is left out: {refusal}", file=sys.stderr)
    return tuple(mode for mode in MODES if mode != "plugin_flash")


def errors_of(
    model: Any, grads: Any, batch: Any, expected: tuple[list[Any], list[Any]]
) -> tuple[list[Any], float, list[float]]:
    """Run one step; returns the outputs, the largest error of one, and each gradient's error.

    Args:
        model: The tower, or what stands in for it.
        grads: Its `MainGrads`.
        batch: The tower's input.
        expected: Outputs and gradients in fp32.
    """
    from scripts.performance.models import tower

    grads.zero()
    outputs = tower.step(model, batch)
    errors = [tower.relative(a, e) for a, e in zip(grads.copy(), expected[1], strict=True)]
    return outputs, tower.largest_relative(outputs, expected[0]), errors


def _record(
    case: str, mode: str, grid: Grid, names: Sequence[str], found: Sequence[tuple[float, list[float]]]
) -> dict[str, Any]:
    errors = [statistics.fmean(values) for values in zip(*(gradients for _, gradients in found), strict=True)]
    kinds = {kind: [e for n, e in zip(names, errors, strict=True) if kind_of(n) == kind] for kind in KINDS_OF_PARAMETER}
    worst = max(errors)
    return {
        **description(case, mode, grid),
        "fp32_output": max(output for output, _ in found),
        "fp32_median": statistics.median(errors),
        "fp32_mean": statistics.fmean(errors),
        "fp32_worst": worst,
        "fp32_kinds": {kind: statistics.fmean(values) for kind, values in kinds.items() if values},
        "grad_worst": names[errors.index(worst)],
        **provenance(len(found), 1),
    }


KINDS_OF_PARAMETER = ("weights", "biases", "norms")


def kind_of(name: str) -> str:
    """Return what a parameter is, by its name."""
    if "norm" in name:
        return "norms"
    return "biases" if name.endswith("bias") else "weights"


def farther_than_eager(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each mode and figure that is farther from fp32 than eager's, beyond what eager varies."""
    eager = {r["case"]: r for r in records if r["mode"] == "eager"}
    lines = []
    for r in records:
        for figure in ("fp32_output", "fp32_median", "fp32_mean", "fp32_worst"):
            limit = eager[r["case"]][figure] * ALLOWANCE
            if not r[figure] <= limit:
                lines.append(
                    f"{r['case']} {r['mode']}: {figure} {r[figure]:.3e}, {ALLOWANCE} times eager's is {limit:.3e}"
                )
    return lines


def print_record(r: dict[str, Any]) -> None:
    """Print one record as a line."""
    kinds = ", ".join(f"{kind} {value:.3e}" for kind, value in r["fp32_kinds"].items())
    print(
        f"{r['case']:18} {r['mode']:12} output {r['fp32_output']:.3e}; gradients median {r['fp32_median']:.3e}, "
        f"mean {r['fp32_mean']:.3e} ({kinds}), worst {r['fp32_worst']:.3e} {r['grad_worst']}"
    )
