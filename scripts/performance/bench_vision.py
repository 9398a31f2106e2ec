"""Times of the vision tower, forward plus backward: eager and the plugin's graphs, in one process.

python scripts/performance/bench_vision.py --out docs/benchmarks/vision_bench.jsonl
"""

import argparse
import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.performance.results import provenance, write_records  # noqa: E402

# Capacities whose slot memory is measured on its own.
MEMORY_TOKENS = (2304, 6720, 16384)


def main() -> int:
    """Measure every case and write the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/vision_bench.jsonl")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--cases", default="", help="comma-separated; all without it")
    args = parser.parse_args()

    from bridge_cg_plugin.options import VisionGraphOptions
    from scripts.performance import tower

    tower.start_process()
    bench = Bench(args.cases.split(",") if args.cases else list(tower.CASES), args.repeats)
    records = [bench.eager(name) for name in bench.batches]
    capacities = tuple(sorted({batch.tokens for batch in bench.batches.values()}))
    options = VisionGraphOptions(impl="transformer_engine", buckets=capacities, slots=1, strict=True)
    helper = new_helper(bench.model, options)
    records += [bench.plugin(name) for name in bench.batches]
    statistics = helper.graphs.statistics()
    helper.delete_cuda_graphs()
    for record in records:
        if record["mode"] == "plugin" and record["tokens"] in MEMORY_TOKENS:
            record.update(slot_memory(bench.model, record["tokens"], options))
    largest = memory_at(statistics, capacities[-1])
    share = (sum(b.memory for b in statistics.buckets.values()) - largest) / largest
    print(f"all smaller buckets together add {share:.1%} to the largest")
    write_records(args.out, records)
    print_table(records)
    return 0


class Bench:
    """The tower, its batches and what eager gave for each.

    Args:
        names: Cases.
        repeats: Timed runs of each measurement.
    """

    def __init__(self, names: list[str], repeats: int) -> None:
        from scripts.performance import tower

        self.tower, self.repeats = tower, repeats
        self.model = tower.build_tower()
        self.grads = tower.MainGrads(self.model)
        self.batches = {name: tower.make_batch(tower.CASES[name], self.model) for name in names}
        self._expected: dict[str, tuple] = {}
        self._eager: dict[str, dict] = {}

    def eager(self, name: str) -> dict:
        """Measure eager and keep its outputs and gradients."""
        import torch

        batch = self.batches[name]
        self._expected[name] = self._results(batch)
        noise = self.tower.largest_relative(self._results(batch)[1], self._expected[name][1])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        self.tower.step(self.model, batch)
        peak = (torch.cuda.max_memory_allocated() - base) / 2**30
        self._eager[name] = {**self._timed(name, "eager"), "ratio": 1.0, "eager_memory_gb": peak, "grad_noise": noise}
        return self._eager[name]

    def plugin(self, name: str) -> dict:
        """Measure replays of the captured tower beside eager's record."""
        batch, eager = self.batches[name], self._eager[name]
        outputs, gradients = self._results(batch)
        timed = self._timed(name, "plugin")
        return {
            **timed,
            "bucket": batch.tokens,
            "slots": 1,
            "ratio": timed["ms"] / eager["ms"],
            "forward_rel": self.tower.largest_relative(outputs, self._expected[name][0]),
            "grad_rel": self.tower.largest_relative(gradients, self._expected[name][1]),
            "grad_noise": eager["grad_noise"],
            "eager_memory_gb": eager["eager_memory_gb"],
        }

    def _results(self, batch) -> tuple:
        self.grads.zero()
        outputs = self.tower.step(self.model, batch)
        return outputs, self.grads.copy()

    def _timed(self, name: str, mode: str) -> dict:
        import torch

        batch = self.batches[name]
        times = self.tower.median_times(lambda: self.tower.step(self.model, batch), self.repeats)
        self.model.eval()
        with torch.no_grad():
            forward = self.tower.median_times(lambda: self.tower.forward(self.model, batch), self.repeats)
        self.model.train()
        return {
            "case": name,
            "mode": mode,
            "tokens": batch.tokens,
            "images": len(self.tower.CASES[name]),
            "ms": times.ms,
            "fwd_ms": forward.ms,
            "host_ms": times.host_ms,
            **provenance(self.repeats, 0),
        }


def new_helper(model, options):
    """Capture the tower with the options and return its helper."""
    from bridge_cg_plugin.upstream.helper import VisionTECudaGraphHelper

    helper = VisionTECudaGraphHelper(model, model.config, options=options)
    helper.create_cudagraphs()
    return helper


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
    half = tokens // 2 // 4 * 4
    helper = new_helper(model, dataclasses.replace(options, buckets=(half, tokens)))
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
