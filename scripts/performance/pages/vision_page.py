"""The tables of docs/benchmarks/vision.md, kernels.md and encoders.md, from the records."""

import statistics
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.runs.results import by_case_and_mode, loss_distance, read_records
from scripts.performance.models.workloads import CASES
from scripts.performance.pages.markdown import (
    Records,
    by_case,
    code,
    number,
    over_eager,
    picture,
    table,
    with_origin,
)

# What the time relative to eager's is meant to be at most.
AIMS = {"1x448": 0.10, "1x768": 0.25, "4x448": 0.27, "8mix": 0.42, "video16": 0.38, "1x2048": 0.75}
GRAPHS = ("plugin", "plugin_fast", "plugin_streams", "plugin_flash", "plugin_flash_streams")
MODES = ("eager", "upstream", "compile", "compile_reduce_overhead", "plugin", "plugin_te_attention", *GRAPHS[1:])
# Those that are measured at every size of the sweep.
SWEEP_MODES = ("eager", "plugin", "plugin_fast", "plugin_flash", "limit")
STEP_MODES = ("eager", "upstream", "plugin", "plugin_language_model", "plugin_full_iteration")


def ratios(records: Records) -> str:
    """Return each graphed mode's time over eager's, the aim, and the fastest mode's time over the arithmetic limit."""
    eager, limit = by_case(records, "eager"), by_case(records, "limit")
    found = [by_case(records, mode) for mode in GRAPHS]
    rows = []
    for case in (case for case in CASES if case in eager and case in found[0]):
        best = min((of_mode[case] for of_mode in found if case in of_mode), key=lambda r: r["ms"])
        rows.append(
            [case, best["tokens"], *(over_eager(of_mode.get(case), eager) for of_mode in found)]
            + [f"{AIMS[case]:.2f}", f"{best['ms'] / limit[case]['ms']:.1f}" if case in limit else ""]
        )
    return table(["case", "tokens", *GRAPHS, "aim", "best over limit"], rows) if rows else ""


def _of_modes(records: Records) -> Records:
    """Return the records of named cases in the order of cases and modes."""
    found = [r for r in records if r["case"] in CASES and r["mode"] in MODES]
    return sorted(found, key=lambda r: (list(CASES).index(r["case"]), MODES.index(r["mode"])))


def times(records: Records) -> str:
    """Return time, kernels and memory of every mode."""
    eager = by_case(records, "eager")
    rows = [
        [r["case"], r["mode"], number(r, "ms"), over_eager(r, eager), number(r, "host_ms"), number(r, "replay_host_ms")]
        + [number(r, "gpu_busy_ms"), number(r, "kernels", "d"), _memory(r)]
        for r in _of_modes(records)
        if "error" not in r
    ]
    header = ["case", "mode", "ms", "ratio", "host ms", "replay host ms", "GPU busy ms", "kernels", "GiB"]
    return table(header, rows) if rows else ""


def _memory(record: dict[str, Any]) -> str:
    return number(record, "eager_memory_gb" if record["mode"] == "eager" else "memory_gb")


def differences(records: Records) -> str:
    """Return how far outputs and gradients of every mode are from eager's."""
    rows = [
        [r["case"], r["mode"], "bit-equal" if r.get("bit_equal") else number(r, "forward_rel", ".0e")]
        + [number(r, "grad_rel", ".1e"), number(r, "grad_noise", ".1e"), r.get("wrong", "")]
        for r in _of_modes(records)
        if "error" not in r and r["mode"] != "eager"
    ]
    header = ["case", "mode", "outputs differ by", "gradients differ by", "two eager runs", "note"]
    return table(header, rows) if rows else ""


def failures(records: Records) -> str:
    """Return what could not be measured, a line for each message of a mode."""
    cases: dict[tuple[str, str], list[str]] = {}
    for r in (r for r in _of_modes(records) if "error" in r):
        cases.setdefault((r["mode"], r["error"]), []).append(r["case"])
    rows = [[mode, ", ".join(found), code(error)] for (mode, error), found in cases.items()]
    return table(["mode", "cases", "error"], rows) if rows else ""


def sweep(records: Records) -> str:
    """Return the milliseconds of single images against tokens, a column for each mode."""
    single = [r for r in records if r["images"] == 1 and not r["case"].startswith("video") and "error" not in r]
    rows = []
    for tokens in sorted({r["tokens"] for r in single}):
        found = {r["mode"]: r for r in single if r["tokens"] == tokens}
        rows.append([tokens, *(number(found.get(mode), "ms") for mode in SWEEP_MODES)])
    return table(["tokens", *(f"{mode} ms" for mode in SWEEP_MODES)], rows) if rows else ""


def sizes(records: Records) -> str:
    """Return the microbatches of real image sizes."""
    found = [r for r in records if "error" not in r]
    rows = []
    for r in found:
        fallbacks = ", ".join(f"{reason} {n}" for reason, n in sorted(r.get("fallbacks", {}).items()))
        rows.append(
            [r["mode"], number(r, "ms", ".0f"), number(r, "ratio", ".2f"), number(r, "padding_share", ".1%")]
            + [number(r, "eager_share", ".1%"), fallbacks or ("none" if "replays" in r else "")]
            + [number(r, "capture_s", ".1f"), number(r, "memory_gb"), number(r, "grad_rel", ".1e")]
        )
    header = ["mode", "ms of all", "ratio", "padding", "eager", "fallbacks", "capture s", "GiB", "gradients differ by"]
    return table(header, rows) if rows else ""


def captures(records: Records) -> str:
    """Return what a recording takes: of each process's first model, of its next one, and of a further bucket."""
    found = {mode: by_case(records, mode) for mode in ("cold", "warm")}
    rows = []
    for case, r in found["cold"].items():
        name = case.rpartition("_")[0].replace("_", " ")
        others = [of_mode.get(case) for of_mode in found.values()]
        seconds = [f"{other['ms'] / 1e3:.2f}" if other else "" for other in others]
        rows.append([name, r["tokens"], *seconds, f"{max(other['grad_rel'] for other in others if other):.1e}"])
    return table(["recording", "tokens", "cold s", "warm s", "gradients differ by"], rows) if rows else ""


def steps(records: Records) -> str:
    """Return whole optimizer steps: ms and, in brackets, the ratio to eager and the largest difference of a loss."""
    shown = [mode for mode in STEP_MODES if any(r["mode"] == mode for r in records)]
    rows = []
    for case in dict.fromkeys(r["case"] for r in records):
        found = {r["mode"]: r for r in records if r["case"] == case}
        images, _, model = case.partition("_")
        rows.append([images, model, *(_step(found.get(mode), found.get("eager")) for mode in shown)])
    return table(["images", "language model", *shown], rows) if rows else ""


def _step(record: dict[str, Any] | None, eager: dict[str, Any] | None) -> str:
    if record is None:
        return ""
    if "error" in record:
        return code(record["error"])
    ms = f"{record['ms']:.0f}"
    if record is eager or eager is None or "error" in eager:
        return ms
    losses, wanted = record.get("losses", ()), eager.get("losses", ())
    beside = [f"{record['ms'] / eager['ms']:.2f}"]
    if losses and len(losses) == len(wanted):
        beside.append(f"{loss_distance(losses, wanted):.0e}")
    return f"{ms} ({', '.join(beside)})"


def families(records: Records) -> str:
    """Return where the GPU time goes: a table for each case, in ms by families of kernels."""
    found = [r for r in _of_modes(records) if r.get("families")]
    names: dict[str, float] = {}
    for r in found:
        for name, ms in r["families"].items():
            names[name] = names.get(name, 0.0) + ms / r["gpu_busy_ms"]
    made = []
    for case in dict.fromkeys(r["case"] for r in found):
        runs = [r for r in found if r["case"] == case]
        rows = [[name, *(number(r["families"], name) for r in runs)] for name in sorted(names, key=lambda n: -names[n])]
        rows.append(["GPU busy", *(number(r, "gpu_busy_ms") for r in runs)])
        rows.append(["forward plus backward", *(number(r, "ms") for r in runs)])
        rows.append(["kernels", *(r["kernels"] for r in runs)])
        rows.append(["commit", *(r["versions"]["commit"] for r in runs)])
        made.append(table([f"{case}, ms", *(r["mode"] for r in runs)], rows))
    return "\n\n".join(made)


def precision(records: Records) -> str:
    """Return how far outputs and gradients are from fp32, a table for each number of layers."""
    found: dict[str, list[list[str]]] = {}
    for r in (r for r in records if "error" not in r):
        case, _, layers = r["case"].rpartition("_")
        figures = [number(r, f"fp32_{name}", ".2e") for name in ("output", "median", "mean", "worst")]
        kinds = [number(r["fp32_kinds"], kind, ".2e") for kind in ("weights", "biases", "norms")]
        found.setdefault(layers.removesuffix("layers"), []).append([case, r["mode"], *figures, *kinds])
    header = ["mode", "outputs", "median", "mean", "worst", "weights", "biases", "norms"]
    return "\n\n".join(table([f"{layers} layers", *header], rows) for layers, rows in found.items())


def encoders(records: Records) -> str:
    """Return the times of other encoders than Qwen3-VL's, a row for each case."""
    rows = []
    for case, modes in by_case_and_mode(records).items():
        eager, exact, default = (modes.get(mode, {}) for mode in ("eager", "plugin", "plugin_fast"))
        tokens = next(iter(modes.values()))["tokens"]
        row = [_encoder(case)[0], tokens, number(eager, "ms"), number(eager, "gpu_busy_ms")]
        for found in (exact, default):
            row += [number(found, "ms"), f"**{found['ratio']:.2f}**" if found else ""]
        rows.append([*row, number(exact or default, "memory_gb")])
    header = ["case", "tokens", "eager ms", "of it GPU busy"]
    measured = ["exact kernels ms", "ratio", "default ms", "ratio", "slot GiB"]
    return table([*header, *measured], rows) if rows else ""


def encoder_flash(records: Records) -> str:
    """Return what FlashAttention gains and how it rounds, a row for each case that was measured with it."""
    rows = []
    for case, modes in by_case_and_mode(records).items():
        if "plugin_flash" not in modes:
            continue
        eager, default, flash = (modes[mode] for mode in ("eager", "plugin_fast", "plugin_flash"))
        row = [_encoder(case)[0], number(eager, "ms"), f"{default['ratio']:.2f}", number(flash, "ms")]
        differences = [number(flash, "forward_rel", ".0e"), number(flash, "grad_rel", ".1e")]
        rows.append([*row, f"**{flash['ratio']:.2f}**", *differences, number(default, "grad_rel", ".1e")])
    header = ["case", "eager ms", "default ratio", "FlashAttention ms", "ratio"]
    return table([*header, "outputs differ by", "gradients differ by", "default's"], rows) if rows else ""


def encoder_differences(records: Records) -> str:
    """Return how far other encoders' outputs and gradients are from eager's, with exact kernels where measured."""
    rows = [
        [*_encoder(case), _kernels(r), "bit-equal" if r.get("bit_equal") else number(r, "forward_rel", ".0e")]
        + [number(r, "grad_rel", ".1e"), number(r, "grad_noise", ".1e")]
        for case, modes in by_case_and_mode(records).items()
        if (r := modes.get("plugin") or modes.get("plugin_fast"))
    ]
    header = ["case", "layers", "kernels", "outputs differ by", "gradients differ by", "two eager runs"]
    return table(header, rows) if rows else ""


def encoder_parity(records: Records) -> str:
    """Return the worst figures of each encoder's mixes, and whether replays are as near to fp32 as eager."""
    named: dict[str, dict[str, Records]] = {}
    for r in records:
        named.setdefault(_mixed(r), {}).setdefault(r["mode"], []).append(r)
    rows = []
    for name, modes in named.items():
        for replays in (found for mode, found in modes.items() if mode != "eager"):
            worst = [max(r[field] for r in replays) for field in ("forward_rel", "grad_rel", "grad_noise")]
            far = [statistics.fmean(r["fp32_mean"] for r in each) for each in (replays, modes["eager"])]
            equal = sum(r["bit_equal"] for r in replays)
            figures = (f"{value:.1e}" for value in (*worst, *far))
            rows.append([name, _kernels(replays[0]), len(replays), equal, *figures])
    header = ["encoder", "kernels", "mixes", "outputs bit-equal", "worst output", "worst gradient", "two eager runs"]
    return table([*header, "gradients from fp32", "eager's from fp32"], rows) if rows else ""


def _mixed(record: dict[str, Any]) -> str:
    """Return the encoder of a mix's record."""
    name: str = record["case"].rsplit("_", 2)[0]
    return name


def _kernels(record: dict[str, Any]) -> str:
    """Return which kernels a record of graphs is of, as readers know them."""
    mode: str = record["mode"]
    return {"plugin": "exact", "plugin_fast": "default"}.get(mode, mode)


def _encoder(case: str) -> tuple[str, str]:
    """Return a case's name and its number of layers."""
    name, _, layers = case.rpartition("_")
    return name, layers.removesuffix("layers")


def vision_parts(folder: Path) -> dict[str, str]:
    """Return the parts of docs/benchmarks/vision.md by the names of their marks.

    Args:
        folder: With the records.
    """
    names = ("vision_bench", "vision_sizes", "vision_captures", "steps")
    bench, coco, recorded, step = (read_records(folder / f"{name}.jsonl") for name in names)
    return {
        "ratios": with_origin(ratios(bench), bench),
        "times": times(bench),
        "differences": differences(bench),
        "failures": failures(bench),
        "sweep": sweep(bench),
        "sizes": with_origin(sizes(coco), coco),
        "captures": with_origin(captures(recorded), recorded),
        "steps": with_origin(steps(step), step),
    }


def kernel_parts(folder: Path) -> dict[str, str]:
    """Return the parts of docs/benchmarks/kernels.md by the names of their marks.

    Args:
        folder: With the records and the plots.
    """
    profile, fp32 = (read_records(folder / f"{name}.jsonl") for name in ("vision_profile", "vision_precision"))
    return {
        "families": with_origin(families(profile), profile),
        "families-plot": picture(folder, "families.svg", "GPU time by families of kernels"),
        "precision": with_origin(precision(fp32), fp32),
    }


def encoder_parts(folder: Path) -> dict[str, str]:
    """Return the parts of docs/benchmarks/encoders.md by the names of their marks.

    Args:
        folder: With the records.
    """
    others, mixes = (read_records(folder / f"{name}.jsonl") for name in ("encoders", "encoders_parity"))
    return {
        "encoders": with_origin(encoders(others), others),
        "encoder-flash": encoder_flash(others),
        "encoder-differences": encoder_differences(others),
        "encoder-parity": with_origin(encoder_parity(mixes), [r | {"case": _mixed(r)} for r in mixes]),
    }
