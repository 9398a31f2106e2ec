"""The tables of docs/benchmarks/packed.md, from the records."""

from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.runs.results import read_records
from scripts.performance.packed.limits import aim_of
from scripts.performance.packed.plans import PLAN
from scripts.performance.pages.markdown import Records, by_case, number, origin, table

MODELS = ("dense", "fp8", "moe", "large", "mamba")
# All layers as one region, experts included.
WHOLE = "plugin_whole"
# What `bench_experts.py` times, as its cases are named.
PRODUCTS = ("forward", "input_gradient", "weight_gradients")


def speed(records: Records) -> str:
    """Return the times of packs of 5 documents, eager and on graphs."""
    eager, plugin, wide, layers = (by_case(records, m) for m in ("eager", "plugin", "plugin_4x", "plugin_layers"))
    both = [*plugin.values(), *by_case(records, WHOLE).values()]
    found = [r for r in both if r["case"].partition("_")[0] in MODELS and r["case"] in eager]
    if not found:
        return ""
    rows, further = [], []
    for r in sorted(found, key=lambda r: (MODELS.index(r["case"].partition("_")[0]), r["mode"] == WHOLE, r["tokens"])):
        base, whole = eager[r["case"]], r["mode"] == WHOLE
        four, parts = (None if whole else mode.get(r["case"]) for mode in (wide, layers))
        more = "" if four is None else f"{four['ms'] / r['ms'] - 1:+.1%}"
        model = r["case"].partition("_")[0]
        name = [f"{model}, experts too" if whole else model, r["tokens"]]
        times = [number(base, "ms"), number(base, "gpu_busy_ms"), number(r, "ms"), f"**{1 / r['ratio']:.2f}**"]
        rows.append([*name, *times, f"{aim_of(model, r['tokens']):.2f}", _equality(r)])
        memory = [number(base, "eager_memory_gb"), number(r, "memory_gb"), number(parts, "memory_gb")]
        further.append([*name, more, number(parts, "ms"), *memory])
    header = ["model", "tokens", "eager ms", "of it GPU busy", "graphs ms", "times as fast", "aim", "equal to eager"]
    others = ["model", "tokens", "4 times the documents", "every part a graph, ms"]
    others += ["eager peak GiB", "graphs GiB", "every part a graph, GiB"]
    return f"{table(header, rows)}\n\n{table(others, further)}\n\n{origin(found)}"


def _equality(record: dict[str, Any]) -> str:
    """Return how near graphs are to eager; records of before the comparison under deterministic algorithms say less."""
    if record["mode"] == WHOLE:
        return "[as near to fp32](../packed.md#how-exact)"
    if record.get("bit_equal"):
        return "to the bit"
    return f"to {number(record, 'grad_rel', '.0e')}, eager to {number(record, 'grad_noise', '.0e')}"


def plans(records: Records) -> str:
    """Return what the planner expected of its choice, and the best of all choices that it had."""
    found = [r for r in records if r["case"].startswith(PLAN) and r["mode"] == "plugin"]
    rows = []
    for r in found:
        others = [o for o in records if o["case"] == r["case"] and o["mode"] != "plugin"]
        best = min(others, key=lambda o: o["ms"])
        chosen = next(o for o in others if o["mode"] == "exhaustive_chosen")
        rows.append(
            [r["case"].removeprefix(PLAN), r["max_packed_seqs"], r["bucket"].replace(",", ", ")]
            + [number(r, "predicted_ms"), number(r, "ms"), f"{r['predicted_ms'] / r['ms'] - 1:+.1%}"]
            + [number(best, "ms"), f"{chosen['ms'] / best['ms'] - 1:+.1%}"]
        )
    header = ["distribution", "documents", "buckets", "predicted ms", "measured ms", "off by", "best of all choices ms"]
    return f"{table([*header, 'the choice above it'], rows)}\n\n{origin(found)}" if rows else ""


def experts(records: Records) -> str:
    """Return the times of experts' products, summed over both linear layers."""
    rows = []
    for tokens in sorted({r["tokens"] for r in records}):
        of_size = [r for r in records if r["tokens"] == tokens]
        row: list[Any] = [tokens]
        for product in PRODUCTS:
            its = [r for r in of_size if product in r["case"]]
            engine, ours = (sum(r["ms"] for r in its if r["mode"] == mode) for mode in ("eager", "plugin"))
            row.append(f"{engine:.2f} / {ours:.2f} (**{engine / ours:.2f}**)")
        rows.append(row)
    header = ["tokens", *(f"{product.replace('_', ' ')}, ms" for product in PRODUCTS)]
    return f"{table(header, rows)}\n\n{origin(records)}" if rows else ""


def parity(records: Records) -> str:
    """Return how far graphs are from eager, over all packs of a kind."""
    rows = []
    for kind in dict.fromkeys(r["case"].rpartition("_")[0] for r in records if "replays" in r and "grad_rel" in r):
        packs = [r for r in records if r["case"].rpartition("_")[0] == kind]
        graphs = [r for r in packs if r["mode"] != "eager_own_rows"]
        own = [r for r in packs if r["mode"] == "eager_own_rows"]
        other = [r["case"] for r in own if not r["bit_equal"]]
        rows.append(
            [kind, graphs[0]["mode"], len(graphs), sum(r["bit_equal"] for r in graphs)]
            + [f"{max(r['grad_rel'] for r in graphs):.1e}", f"{max(r['grad_noise'] for r in graphs):.1e}"]
            + ([len(other), f"{max(r['grad_rel'] for r in own):.1e}", _ratios(graphs, own, other)] if own else [""] * 3)
        )
    header = ["model", "mode", "packs", "equal to the bit", "worst gradient", "eager runs by", "own rows differ"]
    made = table([*header, "by up to", "distance from fp32 over eager's"], rows)
    return f"{made}\n\n{origin(records)}" if rows else ""


def _ratios(graphs: Records, own: Records, cases: list[str]) -> str:
    """Return the smallest and largest ratio of mean distances from fp32, graphs over eager, where these differ."""
    eager = {r["case"]: r["fp32_mean"] for r in own}
    ratios = [r["fp32_mean"] / eager[r["case"]] for r in graphs if r["case"] in cases]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""


def _beside(eager: dict[str, Any], graphs: dict[str, Any]) -> str:
    return f"{number(eager, 'ms')} / {number(graphs, 'ms')} (**{1 / graphs['ratio']:.2f}**)"


def ranks(records: Records) -> str:
    """Return parity and times of two GPUs."""
    eager, plugin = by_case(records, "eager"), by_case(records, "plugin")
    sizes = sorted({r["tokens"] for r in plugin.values()})
    rows = []
    for r in (r for r in records if r["mode"] == "plugin_deterministic"):
        timed = (plugin.get(f"{r['case']}_{size}") for size in sizes)
        times = ["" if p is None else _beside(eager[p["case"]], p) for p in timed]
        rows.append([r["case"], f"{r['forward_rel']:.0e}", f"{r['grad_rel']:.0e}", r["replays"], *times])
    header = ["layout", "losses differ by", "gradients", "replays", *(f"{n} tokens, eager / graphs ms" for n in sizes)]
    return f"{table(header, rows)}\n\n{origin(records)}" if rows else ""


def training(records: Records) -> str:
    """Return the whole runs on packs."""
    rows = []
    for r in (r for r in records if r["mode"] == "plugin" and "losses" in r):
        eager = next((e for e in records if e["case"] == r["case"] and e["mode"] == "eager"), None)
        inside = "inside" if r["inside_spread"] else "**outside**"
        faster = f"**{1 / r['ratio']:.2f}**" if "ratio" in r else ""
        times = [number(eager, "ms", ".0f"), number(r, "ms", ".0f"), faster]
        replays = r["packed_graphs"]["replays"]
        rows.append(
            [r["case"], len(r["losses"]), *times, inside, replays, number(eager, "peak_gb"), number(r, "peak_gb")]
        )
    header = ["case", "steps", "eager ms", "graphs ms", "times as fast", "eager's spread", "replays", "eager peak GiB"]
    return f"{table([*header, 'graphs peak GiB'], rows)}\n\n{origin(records)}" if rows else ""


def packed_parts(folder: Path) -> dict[str, str]:
    """Return the page's parts by the names of their marks.

    Args:
        folder: With the records.
    """
    bench = read_records(folder / "packed.jsonl")
    return {
        "packed_speed": speed(bench),
        "packed_plans": plans(bench),
        "packed_experts": experts(read_records(folder / "experts.jsonl")),
        "packed_parity": parity(read_records(folder / "packed_parity.jsonl")),
        "packed_ranks": ranks(read_records(folder / "packed_parallel.jsonl")),
        "packed_training": training(read_records(folder / "packed_training.jsonl")),
    }
