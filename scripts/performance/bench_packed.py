"""Times of packed language models, forward plus backward: eager and the plugin's graphs, in one process.

python scripts/performance/bench_packed.py --out docs/benchmarks/packed.jsonl --cost-model docs/benchmarks/costs.json

Measures every model at every pack, graphs of every layer's parts, graphs that allow four times the documents there are,
and, for the cost model, dense packs of other shapes. `--plans` also measures what the planner predicts, for three
distributions. A record is written as soon as it is measured; after `--seconds` no further case begins.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.graphs.errors import CaptureError  # noqa: E402
from scripts.performance.results import first_line, output_path, provenance, put_record  # noqa: E402

TOKENS = (2048, 4096, 8192)
DOCUMENTS = 5
# Wanted: eager's time over graphs' time, by model, at each of TOKENS.
WANTED = {
    "dense": (2.5, 1.6, 1.2),
    "moe": (2.0, 1.7, 1.3),
    "large": (0.99, 0.99, 0.99),
    "mamba": (2.0, 0.99, 0.99),
}
# mamba needs packages that are compiled.
DEFAULT_MODELS = ("dense", "moe", "large")
# Parts of layers that a model's graphs have; all layers as one region where none are named.
MODULES = {"moe": ("attn", "moe_router")}
# Those that become a region each, where all layers could be one.
LAYER_MODULES = {"mamba": ("attn", "mlp", "mamba")}
USUAL_LAYER_MODULES = ("attn", "mlp")
MOST_PADDING_COST = 1.03
# Eager runs that say what eager differs from itself by; graphs may differ by this much more, which is 0 for 0.
NOISE_RUNS = 3
NOISE = 1.5
# Packs of other shapes, that tell the parts of the cost model apart: (tokens, documents).
SHAPES = ((1024, 1), (2048, 1), (2048, 32), (4096, 1), (4096, 64), (8192, 1), (8192, 16), (8192, 128))
COST_REPEATS = 5
DISTRIBUTIONS = {
    "mixed": ([50, 200, 700, 2500], [4, 6, 3, 1]),
    "long": ([700, 1500, 3000], [2, 3, 1]),
    "short": ([20, 60, 120, 300], [3, 5, 4, 1]),
}
PACK_SIZE = 4096
MEASURED_PACKS = 16
MEASURED_CHOICES = 4
PLAN_REPEATS = 3

Records = list[dict[str, Any]]


def main() -> int:
    """Measure, write the records, print a table; non-zero when something wanted is missed or was not measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="docs/benchmarks/packed.jsonl if left out")
    parser.add_argument("--cost-model", type=Path, help="write the fitted cost model here")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=600.0, help="no further case begins after this long")
    parser.add_argument("--models", default=",".join(DEFAULT_MODELS), help=f"comma-separated, of {', '.join(WANTED)}")
    parser.add_argument("--fused-rope", action="store_true", help="eager rotates with Transformer Engine's kernel")
    parser.add_argument("--no-packs", action="store_true", help="only the cost model, and plans where asked for")
    parser.add_argument("--plans", action="store_true", help="measure the planner's predictions, too")
    args = parser.parse_args()
    out, end = output_path(args.out, "packed.jsonl"), time.monotonic() + args.seconds

    from scripts.performance import tower

    tower.start_process()
    records: Records = []
    skipped = []
    for name in args.models.split(","):
        bench = Bench(name, args.repeats, args.fused_rope)
        for label, measure in bench.cases(not args.no_packs, args.cost_model, args.plans):
            if time.monotonic() > end:
                skipped.append(label)
                continue
            for record in measure():
                put_record(out, record)
                records.append(record)
        bench.close()
    missed = [*failures(records), *(f"{label}: not measured, --seconds were over" for label in skipped)]
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

        from scripts.performance import language_model, measure, packed_parity, tower

        self.lm, self.tower, self.measure, self.parity = language_model, tower, measure, packed_parity
        self.name, self.repeats = name, repeats
        shape = dataclasses.replace(language_model.SHAPES[name], fused_rope=fused_rope)
        self.model = language_model.build_model(shape)
        self.grads = tower.MainGrads(self.model)
        self.modules = MODULES.get(name, ())
        self.cost: Any = None

    def close(self) -> None:
        """Free the model's memory."""
        import gc

        import torch

        del self.model, self.grads
        gc.collect()
        torch.cuda.empty_cache()

    def cases(
        self, packs: bool, cost_model: Path | None, plans: bool
    ) -> Iterator[tuple[str, Callable[[], Iterator[dict[str, Any]]]]]:
        """Yield what to measure, by name, in the order of its worth."""
        if packs:
            for tokens in TOKENS:
                yield f"{self.name}_{tokens}", lambda tokens=tokens: self.pack(tokens)
        if self.name == "dense" and (cost_model is not None or plans):
            yield "cost model", lambda: self.fit_costs(cost_model)
        if self.name == "dense" and plans:
            for case in DISTRIBUTIONS:
                yield f"plan_{case}", lambda case=case: self.plans(case)

    def pack(self, tokens: int) -> Iterator[dict[str, Any]]:
        """Measure a pack eager, on graphs, on graphs for four times its documents and on those of layers' parts."""
        import torch

        pack = self.lm.make_pack(self.lm.split(tokens, DOCUMENTS))
        runs = [self._results(pack) for _ in range(NOISE_RUNS)]
        forward_noise, grad_noise = self.parity.noise_of(runs)
        expected, gradients = runs[0]
        del runs
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        self._step(pack)
        peak = torch.cuda.max_memory_allocated() - base
        kernels = self.measure.profile(lambda: self._step(pack))
        noise = {"forward_noise": forward_noise, "grad_noise": grad_noise}
        eager = {
            **self._timed(pack, "eager"),
            **noise,
            "ratio": 1.0,
            "eager_memory_gb": peak / 2**30,
            "gpu_busy_ms": kernels.busy_ms,
            "kernels": kernels.count,
        }
        self._show(eager)
        yield eager
        for mode, most, modules in self._modes():
            try:
                helper = self._helper(pack, tokens, most, modules)
            except CaptureError as error:
                yield self._failed(pack, mode, error)
                continue
            losses, found = self._results(pack)
            timed = self._timed(pack, mode)
            statistics = helper.graphs.statistics()
            helper.delete_cuda_graphs()
            record = {
                **timed,
                **noise,
                "bucket": tokens,
                "max_packed_seqs": most,
                "slots": 1,
                "ratio": timed["ms"] / eager["ms"],
                "forward_rel": self.tower.relative(losses, expected),
                "grad_rel": self.tower.largest_relative(found, gradients),
                "memory_gb": statistics.memory_bytes / 2**30,
                "capture_s": statistics.capture_seconds,
                "fallbacks": dict(statistics.fallbacks),
            }
            self._show(record)
            yield record

    def _modes(self) -> Iterator[tuple[str, int, Sequence[str] | None]]:
        """Yield name, documents allowed and parts of layers; None are all parts of every layer, each a region."""
        yield "plugin", DOCUMENTS, self.modules
        yield "plugin_4x", 4 * DOCUMENTS, self.modules
        if not self.modules:
            yield "plugin_layers", DOCUMENTS, None

    def fit_costs(self, out: Path | None) -> Iterator[dict[str, Any]]:
        """Fit the cost model to packs of several shapes, eager and on graphs, and write it; yields no record."""
        from bridge_cg_plugin.planner.cost import save_cost_model
        from scripts.performance.packed_costs import fit

        shapes = (*SHAPES, *((tokens, DOCUMENTS) for tokens in TOKENS))
        packs = [self._measured(self.lm.make_pack(self.lm.split(tokens, count))) for tokens, count in shapes]
        made = provenance(COST_REPEATS, 0)
        origin = f"bench_packed.py, {self.name}, {made['gpu']}, {made['date']}, commit {made['versions']['commit']}"
        self.cost = fit(packs, origin)
        for pack in packs:
            found = f"eager {pack.eager_ms:.1f} ms (GPU {pack.busy_ms:.1f}), graphs {pack.graphs_ms:.1f} ms"
            fitted = f"eager {self.cost.eager_ms(pack.lengths):.1f} ms, graphs "
            fitted += f"{self.cost.graph_ms(pack.tokens, pack.lengths, *pack.limits):.1f} ms"
            print(f"{pack.tokens} tokens, {len(pack.lengths)} documents: {found}; fitted {fitted}", flush=True)
        print(f"cost model: {self.cost}", flush=True)
        if out is not None:
            save_cost_model(out, "packed", self.cost)
        yield from ()

    def _measured(self, pack: Any) -> Any:
        from scripts.performance.packed_costs import Measured

        eager = self._times(pack, COST_REPEATS).ms
        busy = self.measure.profile(lambda: self._step(pack)).busy_ms
        helper = self._helper(pack, pack.tokens, len(pack.lengths), self.modules)
        graphs = self._times(pack, COST_REPEATS).ms
        statistics = helper.graphs.statistics()
        helper.delete_cuda_graphs()
        limits = next(bucket.limits for bucket, counts in statistics.buckets.items() if counts.replays)
        return Measured(pack.lengths, limits, eager, busy, graphs, statistics.memory_bytes / 2**20)

    def plans(self, case: str) -> Iterator[dict[str, Any]]:
        """Plan for a distribution; measure the recommended choice and some others on the same packs."""
        import random

        from bridge_cg_plugin.planner.packing import first_fit_shuffle
        from bridge_cg_plugin.planner.plan import plan_packs

        if self.cost is None:
            print(f"plan_{case}: there is no cost model")
            return
        lengths = random.Random(0).choices(*DISTRIBUTIONS[case], k=4000)
        packs = first_fit_shuffle(lengths, PACK_SIZE)
        plan = plan_packs(packs, self.cost)
        drawn = random.Random(1).sample(packs, MEASURED_PACKS)
        sample = [self.lm.make_pack(pack, seed) for seed, pack in enumerate(drawn)]
        for choice in measured_choices(plan):
            expected = plan_packs_time(drawn, self.cost, choice)
            helper = self.lm.new_helper(
                self.model,
                sample[0],
                modules=self.modules,
                cuda_graph_max_packed_seqs=choice.max_packed_seqs,
                cuda_graph_packed_buckets=list(choice.buckets),
                cuda_graph_packed_slots=1,
                cuda_graph_packed_evaluation=False,
            )
            measured = [self._times(pack, PLAN_REPEATS, warmup=1).ms for pack in sample]
            fallbacks = dict(helper.graphs.statistics().fallbacks)
            helper.delete_cuda_graphs()
            record = {
                "case": f"plan_{case}",
                "mode": f"plugin_{choice.max_packed_seqs}",
                "tokens": PACK_SIZE,
                "max_packed_seqs": choice.max_packed_seqs,
                "ms": sum(measured) / len(measured),
                "predicted_ms": expected,
                "chosen": choice is plan.best,
                "fallbacks": fallbacks,
                **provenance(PLAN_REPEATS, 0),
            }
            found = f"predicted {expected:.1f} ms, measured {record['ms']:.1f} ms"
            print(f"plan {case}: up to {choice.max_packed_seqs} documents, {found}", flush=True)
            yield record

    def _helper(self, pack: Any, tokens: int, most: int, modules: Sequence[str] | None) -> Any:
        return self.lm.new_helper(
            self.model,
            pack,
            modules=LAYER_MODULES.get(self.name, USUAL_LAYER_MODULES) if modules is None else modules,
            by_layer=modules is None,
            cuda_graph_max_packed_seqs=most,
            cuda_graph_packed_buckets=[tokens],
            cuda_graph_packed_slots=1,
            cuda_graph_packed_evaluation=False,
        )

    def _step(self, pack: Any, between: Callable[[], object] | None = None) -> Any:
        return self.lm.step(self.model, pack, between)

    def _times(self, pack: Any, repeats: int, warmup: int = 3) -> Any:
        return self.measure.median_times(lambda between: self._step(pack, between), repeats, warmup)

    def _results(self, pack: Any) -> tuple[Any, list[Any]]:
        self.grads.zero()
        losses = self._step(pack)
        return losses, self.grads.copy()

    def _timed(self, pack: Any, mode: str) -> dict[str, Any]:
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

    def _failed(self, pack: Any, mode: str, error: Exception) -> dict[str, Any]:
        record = {
            "case": f"{self.name}_{pack.tokens}",
            "mode": mode,
            "tokens": pack.tokens,
            "error": first_line(error),
            **provenance(self.repeats, 0),
        }
        print(f"{record['case']:10} {mode:13} {record['error']}", flush=True)
        return record

    def _show(self, record: dict[str, Any]) -> None:
        extra = (
            f", GPU busy {record['gpu_busy_ms']:.1f} ms, {record['kernels']} kernels"
            if record["mode"] == "eager"
            else (
                f", {1 / record['ratio']:.2f} times as fast, losses {record['forward_rel']:.1e} (noise "
                f"{record['forward_noise']:.1e}), gradients {record['grad_rel']:.1e} (noise "
                f"{record['grad_noise']:.1e}), {record['memory_gb']:.1f} GiB"
            )
        )
        print(f"{record['case']:10} {record['mode']:13} {record['ms']:>7.1f} ms{extra}", flush=True)


def measured_choices(plan: Any) -> list[Any]:
    """Return the recommended choice and others around it: the next smaller and larger bounds, and the smallest."""
    place = plan.choices.index(plan.best)
    order = [place, place - 1, place + 1, 0, *range(len(plan.choices))]
    valid = dict.fromkeys(i for i in order if 0 <= i < len(plan.choices))
    return [plan.choices[i] for i in valid][:MEASURED_CHOICES]


def plan_packs_time(packs: Sequence[tuple[int, ...]], cost: Any, choice: Any) -> float:
    """Return what the planner expects of a choice for these packs, in milliseconds a microbatch."""
    from collections import Counter

    from bridge_cg_plugin.planner.plan import expect

    return expect(Counter(packs), cost, choice.max_packed_seqs, choice.buckets).step_ms


def failures(records: Records) -> list[str]:
    """Return what misses what is wanted."""
    measured = {(r["case"], r["mode"]): r for r in records if not r["case"].startswith("plan_")}
    missed = [miss for r in measured.values() if r["mode"] != "eager" for miss in _misses(r, measured)]
    for case in dict.fromkeys(r["case"] for r in records if r["case"].startswith("plan_")):
        missed += _plan_misses(case, [r for r in records if r["case"] == case])
    return missed


def _misses(r: dict[str, Any], measured: dict[tuple[str, str], dict[str, Any]]) -> Iterator[str]:
    case, mode = r["case"], r["mode"]
    if "error" in r:
        yield f"{case}, {mode}: {r['error']}"
        return
    speed, wanted = 1 / r["ratio"], WANTED[case.partition("_")[0]][TOKENS.index(r["tokens"])]
    if mode == "plugin" and speed < wanted:
        yield f"{case}: {speed:.2f} times as fast as eager, wanted {wanted}"
    if r["fallbacks"]:
        yield f"{case}, {mode}: {r['fallbacks']}"
    if not r["grad_rel"] <= NOISE * r["grad_noise"]:
        yield f"{case}, {mode}: gradients differ by {r['grad_rel']:.2e}, eager runs by {r['grad_noise']:.2e}"
    if not r["forward_rel"] <= NOISE * r["forward_noise"]:
        yield f"{case}, {mode}: losses differ by {r['forward_rel']:.2e}, eager runs by {r['forward_noise']:.2e}"
    plugin = measured.get((case, "plugin"), r)
    if mode == "plugin_4x" and r["ms"] > MOST_PADDING_COST * plugin.get("ms", r["ms"]):
        yield f"{case}: four times the documents cost more than 3 %: {r['ms']:.1f} ms"


def _plan_misses(case: str, plans: Records) -> Iterator[str]:
    chosen = next((r for r in plans if r["chosen"]), None)
    if chosen is None:
        yield f"{case}: the recommended choice was not measured"
        return
    if abs(chosen["predicted_ms"] / chosen["ms"] - 1) > 0.15:
        yield f"{case}: predicted {chosen['predicted_ms']:.1f} ms, measured {chosen['ms']:.1f} ms"
    if chosen["ms"] > 1.05 * min(r["ms"] for r in plans):
        yield f"{case}: the choice takes {chosen['ms']:.1f} ms, the best {min(r['ms'] for r in plans):.1f}"


if __name__ == "__main__":
    sys.exit(main())
