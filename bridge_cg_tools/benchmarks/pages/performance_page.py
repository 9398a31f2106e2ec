"""The tables and plots of docs/performance.md, from the records."""

from pathlib import Path
from typing import Any

from bridge_cg_tools.benchmarks.models.workloads import CASES
from bridge_cg_tools.benchmarks.pages.markdown import Records, by_case, number, origin, over_eager, table
from bridge_cg_tools.benchmarks.records.results import loss_distance, read_records

# What the time relative to eager's is meant to be at most.
AIMS = {"1x448": 0.10, "1x768": 0.25, "4x448": 0.27, "8mix": 0.42, "video16": 0.38, "1x2048": 0.75}
FASTER = ("plugin_fast", "plugin_streams", "plugin_flash", "plugin_flash_streams")
MODES = (
    *("eager", "upstream", "compile", "compile_reduce_overhead"),
    *("plugin", "plugin_te_attention", *FASTER),
)
STEP_MODES = ("eager", "upstream", "plugin", "plugin_language_model", "plugin_full_iteration")


def goals(records: Records) -> str:
    """Return the table of the aims: eager, the plugin with what makes it faster, what is left above the limit."""
    eager, plugin, limit = (by_case(records, mode) for mode in ("eager", "plugin", "limit"))
    faster = [by_case(records, mode) for mode in FASTER]
    rows = []
    for case in (case for case in CASES if case in eager and case in plugin):
        measured = [found[case] for found in (plugin, *faster) if case in found]
        best = min(measured, key=lambda r: r["ms"])
        over = f"{best['ms'] / limit[case]['ms']:.1f}" if case in limit else ""
        rows.append(
            [case, plugin[case]["tokens"], number(eager[case], "ms"), number(plugin[case], "ms")]
            + [f"**{over_eager(plugin[case], eager)}**"]
            + [cell for found in faster for cell in (number(found.get(case), "ms"), over_eager(found.get(case), eager))]
            + [f"{AIMS[case]:.2f}", number(limit.get(case), "ms"), over, number(best, "replay_host_ms", ".2f")]
            + [number(plugin[case], "gpu_busy_ms"), number(plugin[case], "kernels", "d")]
        )
    header = ["case", "tokens", "eager ms", "plugin ms", "ratio", "fast kernels ms", "ratio", "two streams ms", "ratio"]
    header += ["FlashAttention ms", "ratio", "with two streams ms", "ratio", "aim", "limit ms", "best over limit"]
    header += ["replay host ms", "GPU busy ms", "kernels"]
    return table(header, rows) if rows else ""


def modes(records: Records) -> str:
    """Return every mode of the named cases beside eager."""
    rows, eager = [], by_case(records, "eager")
    for r in sorted((r for r in records if r["case"] in CASES and r["mode"] in MODES), key=_case_and_mode):
        note = r.get("wrong", "")
        if "error" in r:
            rows.append([r["case"], r["mode"], *[""] * 8, "; ".join(filter(None, (_code(r["error"]), note)))])
            continue
        differs = number(r, "forward_rel", ".0e")
        rows.append(
            [r["case"], r["mode"], number(r, "ms"), over_eager(r, eager), number(r, "host_ms", ".2f")]
            + [number(r, "gpu_busy_ms"), number(r, "kernels", "d"), _memory(r)]
            + ["bit-equal" if r.get("bit_equal") else differs, number(r, "grad_rel", ".1e"), note]
        )
    header = ["case", "mode", "ms", "ratio", "host ms", "GPU busy ms", "kernels", "GiB", "outputs differ by"]
    return table([*header, "gradients differ by", "note"], rows) if rows else ""


def _case_and_mode(record: dict[str, Any]) -> tuple[int, int]:
    return list(CASES).index(record["case"]), MODES.index(record["mode"])


def _memory(record: dict[str, Any]) -> str:
    return number(record, "eager_memory_gb" if record["mode"] == "eager" else "memory_gb")


def _code(text: str) -> str:
    """Quote what a program said, so that it cannot end a cell."""
    return "`" + text.replace("|", "/").replace("`", "'") + "`"


def sweep(records: Records) -> str:
    """Return time against tokens, a column for each mode: milliseconds of single images."""
    single = [r for r in records if r["images"] == 1 and not r["case"].startswith("video") and "error" not in r]
    shown = [mode for mode in (*MODES, "limit") if any(r["mode"] == mode for r in single)]
    rows = []
    for tokens in sorted({r["tokens"] for r in single}):
        found = {r["mode"]: r for r in single if r["tokens"] == tokens}
        rows.append([tokens, *(number(found.get(mode), "ms") for mode in shown)])
    return table(["tokens", *(f"{mode} ms" for mode in shown)], rows) if rows else ""


def sizes(records: Records) -> str:
    """Return the microbatches of real image sizes."""
    rows = []
    for r in (r for r in records if "error" not in r):
        fallbacks = ", ".join(f"{reason} {n}" for reason, n in sorted(r.get("fallbacks", {}).items()))
        rows.append(
            [r["mode"], r["microbatches"], r["images"], r["tokens"], number(r, "ms", ".0f"), number(r, "ratio", ".2f")]
            + [
                number(r, "padding_share", ".1%"),
                number(r, "replays", "d"),
                fallbacks or ("none" if "replays" in r else ""),
            ]
            + [number(r, "grad_rel", ".1e")]
        )
    header = ["mode", "microbatches", "images", "tokens", "ms of all", "ratio", "padding", "replays", "fallbacks"]
    return table([*header, "gradients differ by"], rows) if rows else ""


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
        return _code(record["error"])
    ms = f"{record['ms']:.0f}"
    if record is eager or eager is None or "error" in eager:
        return ms
    losses, wanted = record.get("losses", ()), eager.get("losses", ())
    beside = [f"{record['ms'] / eager['ms']:.2f}"]
    if losses and len(losses) == len(wanted):
        beside.append(f"{loss_distance(losses, wanted):.0e}")
    return f"{ms} ({', '.join(beside)})"


def families(records: Records) -> str:
    """Return where the GPU time goes, in ms by families of kernels."""
    found = [r for r in records if r.get("families") and r["case"] in CASES]
    names: dict[str, float] = {}
    for r in found:
        for name, ms in r["families"].items():
            names[name] = names.get(name, 0.0) + ms / r["gpu_busy_ms"]
    shown = sorted(names, key=names.__getitem__, reverse=True)
    rows = [
        [r["case"], r["mode"], number(r, "ms"), number(r, "gpu_busy_ms"), r["kernels"]]
        + [number(r["families"], name) for name in shown]
        for r in sorted(found, key=_case_and_mode)
    ]
    return table(["case", "mode", "ms", "GPU busy", "kernels", *shown], rows) if rows else ""


def precision(records: Records) -> str:
    """Return how far outputs and gradients are from fp32."""
    figures = ("fp32_output", "fp32_median", "fp32_mean", "fp32_worst")
    rows = []
    for r in (r for r in records if "error" not in r):
        case, _, layers = r["case"].rpartition("_")
        kinds = [number(r["fp32_kinds"], kind, ".2e") for kind in ("weights", "biases", "norms")]
        rows.append(
            [case, layers.removesuffix("layers"), r["mode"], *(number(r, name, ".2e") for name in figures), *kinds]
        )
    header = ["case", "layers", "mode", "outputs", "median", "mean", "worst", "weights", "biases", "norms"]
    return table(header, rows) if rows else ""


def memory(records: Records) -> str:
    """Return memory against time of graphs whose activations leave the device."""
    rows = []
    for r in records:
        head = [r["case"], r["slots"], r["mode"].replace("_", " ")]
        if "error" in r:
            rows.append([*head, *[""] * 7, _code(r["error"])])
            continue
        rows.append(
            [*head, number(r, "memory_gb"), f"**{number(r, 'memory_ratio', '.0%')}**", number(r, "ms")]
            + [f"**{number(r, 'ratio', '.3f')}**", number(r, "pinned_gb"), number(r, "copy_ms", ".0f")]
            + [number(r, "copy_overlap", ".0%"), "yes" if r["bit_equal"] else "NO"]
        )
    header = ["case", "slots", "mode", "device GiB", "of none's", "ms", "over none's", "host GiB", "copies ms"]
    return table([*header, "beside kernels", "outputs bit-equal"], rows) if rows else ""


def limited(records: Records) -> str:
    """Return training runs under a limit of device memory."""
    rows = []
    for r in (r for r in records if r["case"] == "limit"):
        head = [r["mode"].replace("_", " "), number(r, "limit_gb")]
        if "error" in r:
            rows.append([*head, *[""] * 6, _code(r["error"].partition(". ")[0])])
            continue
        losses = f"{r['losses'][0]:.4f} to {r['losses'][-1]:.4f}"
        rows.append(
            [*head, number(r, "peak_gb"), number(r, "pinned_gb"), number(r, "ms"), number(r, "ratio", ".2f")]
            + [losses, f"{r['loss_rel']:.1e}", ""]
        )
    header = ["run", "limit GiB", "peak GiB", "host GiB", "ms a step", "over recompute's", "loss"]
    return table([*header, "largest difference", "error"], rows) if rows else ""


def flat(records: Records) -> str:
    """Return memory over many steps with offloading."""
    looks = {step: look for r in records if r["case"] == "flat" for step, look in r["memory_steps"].items()}
    names = ("allocated_gb", "reserved_gb", "pinned_gb", "resident_gb")
    rows = [[step, *(f"{look[name]:.4f}" for name in names)] for step, look in looks.items()]
    header = ["after step", "device allocated GiB", "device reserved GiB", "page-locked GiB", "process resident GiB"]
    return table(header, rows) if rows else ""


def encoders(records: Records) -> str:
    """Return times of the encoders beside Qwen3-VL's, with parity."""
    eager, exact, fast = (by_case(records, mode) for mode in ("eager", "plugin", "plugin_fast"))
    rows = []
    for case, r in exact.items():
        name, _, layers = case.rpartition("_")
        f = fast.get(case)
        rows.append(
            [name, layers.removesuffix("layers"), r["tokens"], number(eager.get(case), "ms"), number(r, "ms")]
            + [f"**{r['ratio']:.2f}**", number(eager.get(case), "gpu_busy_ms"), number(r, "gpu_busy_ms")]
            + [f"{r['forward_rel']:.0e}", f"{r['grad_rel']:.1e}", f"{r['grad_noise']:.1e}"]
            + ([f"{f['ms']:.1f} ({f['ratio']:.2f})", f"{f['grad_rel']:.1e}"] if f else [""] * 2 * bool(fast))
            + [number(r, "memory_gb")]
        )
    header = ["case", "layers", "tokens", "eager ms", "graphs ms", "ratio", "eager's GPU busy", "graphs' GPU busy"]
    header += ["outputs differ by", "gradients differ by", "two eager runs"]
    header += [*(["fast kernels ms (ratio)", "their gradients"] if fast else []), "slot GiB"]
    return table(header, rows) if rows else ""


def picture(folder: Path, name: str, text: str) -> str:
    """Return a plot as Markdown, nothing where it was not drawn."""
    return f"![{text}](benchmarks/{name})" if (folder / name).exists() else ""


def page_parts(folder: Path) -> dict[str, str]:
    """Return what stands between each pair of marks of docs/performance.md."""
    bench, profile, coco, step, fp32, others, moved, trained = (
        read_records(folder / f"{name}.jsonl")
        for name in (
            *("vision_bench", "vision_profile", "vision_sizes", "steps", "vision_precision"),
            *("encoders", "offload", "offload_training"),
        )
    )
    return {
        "goals": with_origin(goals(bench), bench),
        "modes": modes(bench),
        "sweep": sweep(bench),
        "time": picture(folder, "time.svg", "time of forward plus backward against tokens, all modes"),
        "limit": picture(folder, "limit.svg", "share of the arithmetic limit against tokens"),
        "families": with_origin(families(profile), profile),
        "families-plot": picture(folder, "families.svg", "GPU time by families of kernels"),
        "precision": with_origin(precision(fp32), fp32),
        "memory": with_origin(memory(moved), moved),
        "memory-plot": picture(folder, "memory.svg", "device memory against time, offloading and recompute"),
        "memory-limit": with_origin(limited(trained), trained),
        "memory-flat": flat(trained),
        "encoders": with_origin(encoders(others), others),
        "sizes": with_origin(sizes(coco), coco),
        "steps": with_origin(steps(step), step),
        "steps-plot": picture(folder, "steps.svg", "optimizer steps of pretrain()"),
    }


def with_origin(text: str, records: Records) -> str:
    """Return a table below the line that says where it was measured."""
    return f"{origin(records)}\n\n{text}" if text else ""
