"""Times of the vision tower, forward plus backward: eager and the plugin's graphs, in one process.

python scripts/performance/bench_vision.py --out docs/benchmarks/vision_bench.jsonl
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.performance.results import provenance, write_records  # noqa: E402


def main() -> int:
    """Measure every case and write the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/vision_bench.jsonl")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cases", default="", help="comma-separated; all without it")
    args = parser.parse_args()

    import torch

    from bridge_cg_plugin.options import VisionGraphOptions
    from bridge_cg_plugin.upstream.helper import VisionTECudaGraphHelper
    from scripts.performance import tower

    tower.start_process()
    model = tower.build_tower()
    grads = tower.MainGrads(model)
    names = args.cases.split(",") if args.cases else list(tower.CASES)
    batches = {name: tower.make_batch(tower.CASES[name], model) for name in names}
    records, expected = [], {}

    def common(name: str, mode: str, times, forward_ms: float) -> dict:
        batch = batches[name]
        return {
            "case": name,
            "mode": mode,
            "tokens": batch.tokens,
            "images": len(tower.CASES[name]),
            "ms": times.ms,
            "fwd_ms": forward_ms,
            "host_ms": times.host_ms,
            **provenance(args.repeats, 0),
        }

    def forward_ms(batch) -> float:
        with torch.no_grad():
            return tower.median_times(lambda: tower.forward(model, batch), args.repeats).ms

    for name, batch in batches.items():
        grads.zero()
        outputs = tower.step(model, batch)
        expected[name] = (outputs, grads.copy())
        grads.zero()
        tower.step(model, batch)
        noise = tower.largest_relative(grads.copy(), expected[name][1])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        tower.step(model, batch)
        peak = (torch.cuda.max_memory_allocated() - base) / 2**30
        times = tower.median_times(lambda b=batch: tower.step(model, b), args.repeats)
        records.append(
            {
                **common(name, "eager", times, forward_ms(batch)),
                "ratio": 1.0,
                "eager_memory_gb": peak,
                "grad_noise": noise,
            }
        )

    capacities = tuple(sorted({b.tokens for b in batches.values()}))
    options = VisionGraphOptions(impl="transformer_engine", buckets=capacities, slots=1, strict=True)
    helper = VisionTECudaGraphHelper(model, model.config, options=options)
    helper.create_cudagraphs()
    for name, batch in batches.items():
        eager = next(r for r in records if r["case"] == name and r["mode"] == "eager")
        grads.zero()
        outputs = tower.step(model, batch)
        forward_rel = tower.largest_relative(outputs, expected[name][0])
        grad_rel = tower.largest_relative(grads.copy(), expected[name][1])
        times = tower.median_times(lambda b=batch: tower.step(model, b), args.repeats)
        records.append(
            {
                **common(name, "plugin", times, forward_ms(batch)),
                "bucket": batch.tokens,
                "slots": 1,
                "ratio": times.ms / eager["ms"],
                "forward_rel": forward_rel,
                "grad_rel": grad_rel,
                "grad_noise": eager["grad_noise"],
                "eager_memory_gb": eager["eager_memory_gb"],
            }
        )
    print(helper.graphs.report())
    statistics = helper.graphs.statistics()
    helper.delete_cuda_graphs()
    for tokens in (2304, 6720, 16384):
        if tokens not in capacities:
            continue
        memory = slot_memory(model, tokens, options)
        for record in records:
            if record["mode"] == "plugin" and record["tokens"] == tokens:
                record.update(memory)
    largest = memory_at(statistics, capacities[-1])
    share = (sum(b.memory for b in statistics.buckets.values()) - largest) / largest
    print(f"all smaller buckets together add {share:.1%} to the largest")
    write_records(args.out, records)
    print_table(records)
    return 0


def print_table(records: list[dict]) -> None:
    """Print the plugin's records beside eager's times."""
    print(f"{'case':8} {'tokens':>6} {'eager':>7} {'plugin':>7} {'ratio':>5} {'host':>5}  differences and memory")
    for r in records:
        if r["mode"] != "plugin":
            continue
        print(
            f"{r['case']:8} {r['tokens']:>6} {r['ms'] / r['ratio']:>7.1f} {r['ms']:>7.1f} {r['ratio']:>5.2f} "
            f"{r['host_ms']:>5.2f}  forward {r['forward_rel']:.1e}, gradient {r['grad_rel']:.1e} (noise "
            f"{r['grad_noise']:.1e}), {r.get('memory_gb', 0):.2f} GiB (eager {r['eager_memory_gb']:.2f}), "
            f"half as large a bucket adds {r.get('added_share', 0):.1%}"
        )


def memory_at(statistics, tokens: int) -> int:
    """Return the pool memory in bytes that the buckets of one capacity added."""
    return sum(counts.memory for bucket, counts in statistics.buckets.items() if bucket.tokens == tokens)


def slot_memory(model, tokens: int, options) -> dict:
    """Return a slot's memory at one capacity, and the share that a bucket half as large adds."""
    import dataclasses

    from bridge_cg_plugin.upstream.helper import VisionTECudaGraphHelper

    half = tokens // 2 // 4 * 4
    helper = VisionTECudaGraphHelper(model, model.config, options=dataclasses.replace(options, buckets=(half, tokens)))
    helper.create_cudagraphs()
    statistics = helper.graphs.statistics()
    helper.delete_cuda_graphs()
    large, small = memory_at(statistics, tokens), memory_at(statistics, half)
    return {
        "memory_gb": (large + statistics.static_bytes) / 2**30,
        "added_share": small / large,
        "capture_s": statistics.capture_seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
