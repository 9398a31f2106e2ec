"""What is wanted of the times and the parity of packed language models."""

from collections.abc import Iterator
from typing import Any

from scripts.performance.packed.plans import COSTS, PLAN
from scripts.performance.packed.plans import misses as plan_misses

TOKENS = (2048, 4096, 8192)
# Aims: eager's time over graphs' time, by model, at each of TOKENS.
WANTED = {
    "dense": (2.5, 1.6, 1.2),
    "fp8": (2.0, 1.43, 0.99),
    "moe": (2.0, 1.7, 1.3),
    "large": (0.99, 0.99, 0.99),
    "mamba": (2.0, 0.99, 0.99),
}
MOST_PADDING_COST = 1.03
NOISE = 1.5
Records = list[dict[str, Any]]


def difference(record: dict[str, Any]) -> str:
    """Return how far graphs are from eager, and eager from itself."""
    losses = f"losses differ by {record['forward_rel']:.2e}, eager runs by {record['forward_noise']:.2e}"
    return f"{losses}; gradients by {record['grad_rel']:.2e}, eager runs by {record['grad_noise']:.2e}"


def _is_eagers(record: dict[str, Any]) -> bool:
    """Whether graphs gave what eager gives: to the bit, or no farther from it than it is from itself."""
    if "bit_equal" in record:
        return bool(record["bit_equal"])
    near = (record[f"{kind}_rel"] <= NOISE * record[f"{kind}_noise"] for kind in ("forward", "grad"))
    return all(near)


def aim_of(model: str, tokens: int) -> float:
    """Return how many times as fast as eager graphs must be."""
    return WANTED[model][TOKENS.index(tokens)]


def failures(records: Records) -> list[str]:
    """Return what misses what is wanted."""
    measured = {(r["case"], r["mode"]): r for r in records if not r["case"].startswith((PLAN, COSTS))}
    missed = [miss for r in measured.values() if r["mode"] != "eager" for miss in _misses(r, measured)]
    for case in dict.fromkeys(r["case"] for r in records if r["case"].startswith(PLAN)):
        missed += plan_misses(case, [r for r in records if r["case"] == case])
    return missed


def _named(case: str, mode: str) -> str:
    return case if mode == "plugin" else f"{case}, {mode}"


def _misses(r: dict[str, Any], measured: dict[tuple[str, str], dict[str, Any]]) -> Iterator[str]:
    case, mode = r["case"], r["mode"]
    if "error" in r:
        yield f"{case}, {mode}: {r['error']}"
        return
    speed, wanted = 1 / r["ratio"], aim_of(case.partition("_")[0], r["tokens"])
    if mode in ("plugin", "plugin_whole") and speed < wanted:
        yield f"{_named(case, mode)}: {speed:.2f} times as fast as eager, wanted {wanted}"
    if r["fallbacks"]:
        yield f"{case}, {mode}: {r['fallbacks']}"
    if mode == "plugin" and not _is_eagers(r):
        yield f"{case}: {difference(r)}"
    plugin = measured.get((case, "plugin"), r)
    if mode == "plugin_4x" and r["ms"] > MOST_PADDING_COST * plugin.get("ms", r["ms"]):
        yield f"{case}: four times the documents cost more than 3 %: {r['ms']:.1f} ms"
