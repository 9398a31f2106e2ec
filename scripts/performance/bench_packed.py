"""Times of packed language models, forward plus backward: eager and the plugin's graphs, in one process.

python scripts/performance/bench_packed.py --out docs/benchmarks/packed.jsonl --cost-model docs/benchmarks/costs.json

Measures every model at every pack, graphs that allow four times the documents there are, and, for the cost model, dense
packs of other shapes. `--plans` also measures what the planner predicts, for three distributions.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.performance.results import output_path, provenance, put_record  # noqa: E402

TOKENS = (2048, 4096, 8192)
DOCUMENTS = 5
# Wanted: eager's time over graphs' time, by model, at each of TOKENS.
WANTED = {"dense": (2.5, 1.6, 1.2), "moe": (2.0, 1.7, 1.3), "large": (0.99, 0.99, 0.99)}
MODULES = {"moe": ("attn",)}
MOST_PADDING_COST = 1.03
# Packs of other shapes, that tell the parts of the cost model apart: (tokens, documents).
SHAPES = ((1024, 1), (2048, 1), (2048, 32), (4096, 1), (4096, 64), (8192, 1), (8192, 16), (8192, 128))
DISTRIBUTIONS = {
    "short": ([20, 60, 120, 300], [3, 5, 4, 1]),
    "mixed": ([50, 200, 700, 2500], [4, 6, 3, 1]),
    "long": ([700, 1500, 3000], [2, 3, 1]),
}
PACK_SIZE = 4096
MEASURED_PACKS = 24
MEASURED_CHOICES = 4


def main() -> int:
    """Measure, write the records, print a table; non-zero when something wanted is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="docs/benchmarks/packed.jsonl if left out")
    parser.add_argument("--cost-model", type=Path, help="write the fitted cost model here")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--models", default="dense,moe,large", help="comma-separated")
    parser.add_argument("--fused-rope", action="store_true", help="eager rotates with Transformer Engine's kernel")
    parser.add_argument("--plans", action="store_true", help="measure the planner's predictions, too")
    args = parser.parse_args()

    from scripts.performance import tower

    tower.start_process()
    records = []
    for name in args.models.split(","):
        bench = Bench(name, args.repeats, args.fused_rope)
        records += [record for tokens in TOKENS for record in bench.pack(tokens)]
        if name == "dense":
            cost = bench.cost_model()
            if args.cost_model is not None:
                from bridge_cg_plugin.planner.cost import save_cost_model

                save_cost_model(args.cost_model, "packed", cost)
            if args.plans:
                records += [record for case in DISTRIBUTIONS for record in bench.plans(case, cost)]
        bench.close()
    for record in records:
        put_record(output_path(args.out, "packed.jsonl"), record)
    missed = failures(records)
    print("\n".join(missed) or f"all {len(records)} records inside their limits")
    return 1 if missed else 0


class Bench:
    """One model, its packs and what eager gave for each.

    Args:
        name: Of the model.
        repeats: Timed runs of each measurement.
        fused_rope: Whether eager rotates with Transformer Engine's kernel.
    """

    def __init__(self, name: str, repeats: int, fused_rope: bool) -> None:
        import dataclasses

        from scripts.performance import language_model, measure, tower

        self.lm, self.tower, self.measure = language_model, tower, measure
        self.name, self.repeats = name, repeats
        shape = dataclasses.replace(language_model.SHAPES[name], fused_rope=fused_rope)
        self.model = language_model.build_model(shape)
        self.grads = tower.MainGrads(self.model)
        self.modules = MODULES.get(name, ())

    def close(self) -> None:
        """Free the model's memory."""
        import gc

        import torch

        del self.model, self.grads
        gc.collect()
        torch.cuda.empty_cache()

    def pack(self, tokens: int) -> list[dict]:
        """Measure a pack eager, on graphs, and on graphs that allow four times its documents."""
        import torch

        pack = self.lm.make_pack(self.lm.split(tokens, DOCUMENTS))
        expected, first = self._results(pack)
        _, second = self._results(pack)
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        self._step(pack)
        eager = {
            **self._timed(pack, "eager"),
            "ratio": 1.0,
            "grad_noise": self.tower.largest_relative(second, first),
            "eager_memory_gb": (torch.cuda.max_memory_allocated() - base) / 2**30,
        }
        kernels = self.measure.profile(lambda: self._step(pack))
        eager |= {"gpu_busy_ms": kernels.busy_ms, "kernels": kernels.count}
        self._show(eager)
        records = [eager]
        for mode, most in (("plugin", DOCUMENTS), ("plugin_4x", 4 * DOCUMENTS)):
            helper = self._helper(pack, tokens, most)
            losses, gradients = self._results(pack)
            timed = self._timed(pack, mode)
            statistics = helper.graphs.statistics()
            helper.delete_cuda_graphs()
            records.append(
                {
                    **timed,
                    "bucket": tokens,
                    "max_packed_seqs": most,
                    "slots": 1,
                    "ratio": timed["ms"] / eager["ms"],
                    "forward_rel": self.tower.relative(losses, expected),
                    "grad_rel": self.tower.largest_relative(gradients, first),
                    "grad_noise": eager["grad_noise"],
                    "memory_gb": statistics.memory_bytes / 2**30,
                    "capture_s": statistics.capture_seconds,
                    "fallbacks": dict(statistics.fallbacks),
                }
            )
            self._show(records[-1])
        return records

    def cost_model(self):
        """Return the cost model that fits packs of several shapes, eager and on graphs, best."""
        import numpy as np

        from bridge_cg_plugin.graphs.buckets import scan_cost
        from bridge_cg_plugin.planner.cost import MILLION, CostModel

        packs = {
            (tokens, count): self.lm.make_pack(self.lm.split(tokens, count))
            for tokens, count in (*SHAPES, *((tokens, DOCUMENTS) for tokens in TOKENS))
        }
        eager, graphs, busy, memory = {}, {}, {}, {}
        for key, pack in packs.items():
            eager[key] = self._times(pack, self.repeats).ms
            busy[key] = self.measure.profile(lambda pack=pack: self._step(pack)).busy_ms
        for (tokens, count), pack in packs.items():
            helper = self._helper(pack, tokens, count)
            graphs[tokens, count] = self._times(pack, self.repeats).ms
            memory[tokens] = helper.graphs.statistics().memory_bytes / 2**20
            helper.delete_cuda_graphs()
        rows, times = [], []
        for (tokens, count), pack in packs.items():
            squares = sum(n * n for n in pack.lengths) / MILLION
            rows.append([1.0, tokens, squares, scan_cost(count, max(pack.lengths)) / MILLION])
            times.append(graphs[tokens, count])
        fixed, per_token, per_square, per_row = _non_negative(np.array(rows), np.array(times))
        # Where the host is the slower one its time shows, where the GPU is, what it waits.
        bound = [key for key in packs if eager[key] > 1.5 * busy[key]]
        stalls = [eager[key] - graphs[key] for key in packs if key not in bound] or [0.0]
        host, per_segment = _non_negative(
            np.array([[1.0, count] for _, count in bound] or [[1.0, 0.0]]),
            np.array([eager[key] for key in bound] or [0.0]),
        )
        memory_fixed, memory_per_token = _non_negative(
            np.array([[1.0, tokens] for tokens in memory]), np.array(list(memory.values()))
        )
        made = provenance(self.repeats, 0)
        model = CostModel(
            origin=f"bench_packed.py, {self.name}, {made['gpu']}, {made['date']}, commit {made['versions']['commit']}",
            fixed_ms=fixed,
            per_token_ms=per_token,
            per_square_ms=per_square,
            per_row_ms=per_row,
            replay_ms=0.0,
            host_ms=host,
            host_per_segment_ms=per_segment,
            stall_ms=max(sorted(stalls)[len(stalls) // 2], 0.0),
            memory_fixed_mb=memory_fixed,
            memory_per_token_mb=memory_per_token,
        )
        print(f"cost model: {model}")
        return model

    def plans(self, case: str, cost) -> list[dict]:
        """Plan for a distribution; measure the recommended choice and some others on the same packs."""
        import random

        from bridge_cg_plugin.planner.packing import first_fit_shuffle
        from bridge_cg_plugin.planner.plan import plan_packs

        lengths = random.Random(0).choices(*DISTRIBUTIONS[case], k=4000)
        packs = first_fit_shuffle(lengths, PACK_SIZE)
        plan = plan_packs(packs, cost)
        drawn = random.Random(1).sample(packs, MEASURED_PACKS)
        sample = [self.lm.make_pack(pack, seed) for seed, pack in enumerate(drawn)]
        records = []
        others = [choice for choice in plan.choices if choice is not plan.best]
        for choice in (plan.best, *random.Random(2).sample(others, min(len(others), MEASURED_CHOICES - 1))):
            expected = plan_packs_time([pack.lengths for pack in sample], cost, choice)
            helper = self.lm.new_helper(
                self.model,
                sample[0],
                modules=self.modules,
                cuda_graph_max_packed_seqs=choice.max_packed_seqs,
                cuda_graph_packed_buckets=list(choice.buckets),
            )
            measured = [self._times(pack, 3, warmup=1).ms for pack in sample]
            helper.delete_cuda_graphs()
            records.append(
                {
                    "case": f"plan_{case}",
                    "mode": f"plugin_{choice.max_packed_seqs}",
                    "tokens": PACK_SIZE,
                    "max_packed_seqs": choice.max_packed_seqs,
                    "ms": sum(measured) / len(measured),
                    "predicted_ms": expected,
                    "chosen": choice is plan.best,
                    **provenance(3, 0),
                }
            )
            found = f"predicted {expected:.1f} ms, measured {records[-1]['ms']:.1f} ms"
            print(f"plan {case}: up to {choice.max_packed_seqs} documents, {found}")
        return records

    def _helper(self, pack, tokens: int, most: int):
        return self.lm.new_helper(
            self.model,
            pack,
            modules=self.modules,
            cuda_graph_max_packed_seqs=most,
            cuda_graph_packed_buckets=[tokens],
            cuda_graph_packed_slots=1,
        )

    def _step(self, pack, between=None):
        return self.lm.step(self.model, pack, between)

    def _times(self, pack, repeats: int, warmup: int = 3):
        return self.measure.median_times(lambda between: self._step(pack, between), repeats, warmup)

    def _results(self, pack) -> tuple:
        self.grads.zero()
        losses = self._step(pack)
        return losses, self.grads.copy()

    def _timed(self, pack, mode: str) -> dict:
        times = self._times(pack, self.repeats)
        return {
            "case": f"{self.name}_{pack.tokens}",
            "mode": mode,
            "tokens": pack.tokens,
            "documents": len(pack.lengths),
            "ms": times.ms,
            "fwd_ms": times.fwd_ms,
            "host_ms": times.host_ms,
            **provenance(self.repeats, 0),
        }

    def _show(self, record: dict) -> None:
        extra = (
            ""
            if record["mode"] == "eager"
            else (
                f", {1 / record['ratio']:.2f} times as fast, losses {record['forward_rel']:.1e}, gradients "
                f"{record['grad_rel']:.1e} (noise {record['grad_noise']:.1e}), {record['memory_gb']:.1f} GiB"
            )
        )
        busy = f", GPU busy {record['gpu_busy_ms']:.1f} ms" if "gpu_busy_ms" in record else ""
        print(f"{record['case']:10} {record['mode']:10} {record['ms']:>7.1f} ms{busy}{extra}")


def plan_packs_time(packs: Sequence[tuple[int, ...]], cost, choice) -> float:
    """Return what the planner expects of a choice for these packs, in milliseconds a microbatch."""
    from collections import Counter

    from bridge_cg_plugin.planner.plan import expect

    return expect(Counter(packs), cost, choice.max_packed_seqs, choice.buckets).step_ms


def _non_negative(rows, values) -> list[float]:
    """Return the least-squares weights of at least 0: columns that would go below are left out."""
    import numpy as np

    kept = list(range(rows.shape[1]))
    while True:
        weights, *_ = np.linalg.lstsq(rows[:, kept], values, rcond=None)
        below = [column for column, weight in zip(kept, weights, strict=True) if weight < 0]
        if not below:
            break
        kept = [column for column in kept if column not in below]
    found = dict(zip(kept, map(float, weights), strict=True))
    return [found.get(column, 0.0) for column in range(rows.shape[1])]


def failures(records: list[dict]) -> list[str]:
    """Return what misses what is wanted."""
    missed = []
    measured = {(r["case"], r["mode"]): r for r in records if not r["case"].startswith("plan_")}
    for (case, mode), r in measured.items():
        if mode == "eager":
            continue
        speed, wanted = 1 / r["ratio"], WANTED[case.partition("_")[0]][TOKENS.index(r["tokens"])]
        if mode == "plugin" and speed < wanted:
            missed.append(f"{case}: {speed:.2f} times as fast as eager, wanted {wanted}")
        if r["fallbacks"]:
            missed.append(f"{case}, {mode}: {r['fallbacks']}")
        if not r["grad_rel"] <= max(1.5 * r["grad_noise"], 1e-2):
            missed.append(f"{case}, {mode}: gradients differ by {r['grad_rel']:.2e}")
        if not r["forward_rel"] <= 2e-3:
            missed.append(f"{case}, {mode}: losses differ by {r['forward_rel']:.2e}")
        if mode == "plugin_4x" and r["ms"] > MOST_PADDING_COST * measured[case, "plugin"]["ms"]:
            missed.append(f"{case}: four times the documents cost more than 3 %: {r['ms']:.1f} ms")
    for case in dict.fromkeys(r["case"] for r in records if r["case"].startswith("plan_")):
        plans = [r for r in records if r["case"] == case]
        chosen = next(r for r in plans if r["chosen"])
        if abs(chosen["predicted_ms"] / chosen["ms"] - 1) > 0.15:
            missed.append(f"{case}: predicted {chosen['predicted_ms']:.1f} ms, measured {chosen['ms']:.1f} ms")
        if chosen["ms"] > 1.05 * min(r["ms"] for r in plans):
            missed.append(f"{case}: the choice takes {chosen['ms']:.1f} ms, the best {min(r['ms'] for r in plans):.1f}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
