"""Packed documents over several GPUs that share layers or documents: graphs against eager, parity and times.

    python scripts/performance/bench_packed_parallel.py --out docs/benchmarks/packed_parallel.jsonl
    python scripts/performance/bench_packed_parallel.py --gpus 2 --layouts CP2 CP2_a2a --out FILE
    python scripts/performance/bench_packed_parallel.py --gpus 2 --layouts TP2_mamba CP2_mamba --out FILE
    python scripts/performance/bench_packed_parallel.py --gpus 4 --layouts CP4_a2a_p2p --out FILE

Without `--layouts`, those of two GPUs that need no compiled packages are measured. Every layout has a process for each
GPU, and two GPUs: on four GPUs two layouts are measured side by side, each on cores of its own, and further ones where
one ends. The processes of all import at the start, so nothing imports beside
what is timed. Parity is measured under deterministic algorithms, on a small model and on as many rows as the graphs
have; times on the dense model of bench_packed.py, the slower rank's. A layout's records are written as soon as it has
ended.
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import output_path, provenance, put_cases, put_record
from scripts.performance.measuring.machine import gpus_here
from scripts.performance.packed.parallel import (
    EXPERTS,
    FOUR_GPUS,
    HYBRIDS,
    LAYOUTS,
    REPEATS,
    measured,
    misses,
    records_of,
    started,
)


def main() -> int:
    """Run the layouts and write records; non-zero if graphs differ from eager or are not faster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", choices=(*LAYOUTS, *EXPERTS, *HYBRIDS, *FOUR_GPUS), default=LAYOUTS)
    parser.add_argument("--gpus", type=int, help="GPUs to use; all without it")
    parser.add_argument("--out", type=Path, help="docs/benchmarks/packed_parallel.jsonl if left out")
    args = parser.parse_args()
    began, missed = time.monotonic(), []
    out = output_path(args.out, "packed_parallel.jsonl")
    with started(args.layouts, gpus_here() if args.gpus is None else args.gpus) as places:
        origin = provenance(REPEATS, 0)  # imports PyTorch, beside the processes
        for layout, found in measured(places):
            print(f"{layout} ended at {time.monotonic() - began:.0f} s", flush=True)
            if isinstance(found, str):
                put_record(out, {"case": layout, "mode": "plugin", "error": found[-300:], **origin})
                print(f"{layout}: {found}", flush=True)
                missed.append(f"{layout}: {found.splitlines()[0]}")
                continue
            records = records_of(layout, found, origin)
            put_cases(out, records)
            print("\n".join(map(json.dumps, records)), flush=True)
            missed += [f"{layout}: {miss}" for miss in misses(found)]
    print("\n".join(missed) or "all layouts equal eager, and are faster")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
