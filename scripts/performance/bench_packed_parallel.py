"""Packed documents over two GPUs that share layers or documents: graphs against eager, parity and times.

python scripts/performance/bench_packed_parallel.py --out docs/benchmarks/packed_parallel.jsonl

Every layout has a process for each GPU. Parity is measured under deterministic algorithms, on a small model and on as
many rows as the graphs have; times on the dense model of bench_packed.py, the slower rank's. A layout's records are
written as soon as it has ended.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.photographs.processes import TrainingFailed, TrainingProcess  # noqa: E402
from scripts.performance.results import output_path, provenance, put_record  # noqa: E402

MODULE = "scripts.performance.packed_ranks"
# What packed_ranks.py knows: two GPUs share layers, layers and the tokens between them, or documents.
LAYOUTS = ("TP2", "TP2_sequence", "CP2")
GPUS = 2
REPEATS = 7
# Seconds that a layout's processes have; they wait for each other, and one that hangs must not keep the others.
LIMIT_S = 90.0
# What a rank counts where one of them cannot capture.
FAILED = {"capture_failed": 1}


def main() -> int:
    """Run the layouts and write records; non-zero if graphs differ from eager or are not faster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--out", type=Path, help="docs/benchmarks/packed_parallel.jsonl if left out")
    args = parser.parse_args()
    out = output_path(args.out, "packed_parallel.jsonl")
    missed, began = [], time.monotonic()
    for layout, found in run_layouts(args.layouts):
        print(f"{layout} ended at {time.monotonic() - began:.0f} s", flush=True)
        if isinstance(found, str):
            put_record(out, {"case": layout, "mode": "plugin", "error": found[-300:], **provenance(REPEATS, 0)})
            print(f"{layout}: {found}", flush=True)
            missed.append(f"{layout}: {found.splitlines()[0]}")
            continue
        for record in records_of(layout, found):
            put_record(out, record)
            print(json.dumps(record), flush=True)
        missed += [f"{layout}: {miss}" for miss in misses(found)]
    print("\n".join(missed) or "all layouts equal eager, and are faster")
    return 1 if missed else 0


def run_layouts(
    layouts: Sequence[str], log: Path | None = None, words: Sequence[str] = ()
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Run layouts one after the other, while the processes of the next import; yields what each found, or its error.

    Args:
        layouts: Their names.
        log: Folder for the processes' output; without it, it goes to this process's.
        words: Further words of the processes' command lines.
    """
    with ExitStack() as stack:
        processes = {}
        for layout in layouts:
            place = None if log is None else log / f"{layout}.log"
            processes[layout] = TrainingProcess(place, GPUS, range(GPUS), module=MODULE)
            stack.callback(processes[layout].close)
        for layout, process in processes.items():
            try:
                process.wait_until_ready()
                given = ["--layout", layout, "--repeats", str(REPEATS), *words]
                yield layout, process.train("graphs", given, LIMIT_S)
            except TrainingFailed as error:
                yield layout, str(error)


def records_of(layout: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records of what a layout's ranks found: one of the parity, two for each size that was timed."""
    origin = provenance(REPEATS, 0)
    worst = [max(far[i] for rank in found["ranks"] for far in rank["far"].values()) for i in range(2)]
    replays, fallbacks = found["ranks"][0]["replays"], found["ranks"][0]["fallbacks"]
    parity_of_all = {"forward_rel": worst[0], "grad_rel": worst[1], "replays": replays, "fallbacks": fallbacks}
    records = [{"case": layout, "mode": "plugin_deterministic", **parity_of_all, **origin}]
    for tokens in found["ranks"][0]["ms"]:
        eager, graphs = (max(rank["ms"][tokens][mode] for rank in found["ranks"]) for mode in ("eager", "plugin"))
        for mode, ms in (("eager", eager), ("plugin", graphs)):
            timed = {"case": f"{layout}_{tokens}", "mode": mode, "tokens": int(tokens), "ms": ms, "ratio": ms / eager}
            records.append({**timed, **origin})
    return records


def misses(found: dict[str, Any]) -> list[str]:
    """Return what is not as it must be."""
    missed = []
    for number, rank in enumerate(found["ranks"]):
        differ = {name: far for name, far in rank["far"].items() if far != [0.0, 0.0]}
        if differ:
            missed.append(f"rank {number} differs from eager (losses, worst gradient): {differ}")
        if rank["fallbacks"] != dict.fromkeys(rank["beyond"], 1):
            missed.append(f"rank {number} counted {rank['fallbacks']}, wanted each of {rank['beyond']} once")
        if rank.get("failing", FAILED) != FAILED:
            missed.append(f"rank {number}, where one rank cannot capture: {rank['failing']}")
        for tokens, ms in rank["ms"].items():
            if ms["plugin"] >= ms["eager"]:
                missed.append(f"rank {number}, {tokens} tokens: {ms['plugin']:.1f} ms, eager {ms['eager']:.1f} ms")
    if len({json.dumps([rank["replays"], rank["fallbacks"]]) for rank in found["ranks"]}) > 1:
        missed.append(f"ranks chose otherwise: {[(r['replays'], r['fallbacks']) for r in found['ranks']]}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
