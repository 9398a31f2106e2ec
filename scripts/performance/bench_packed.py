"""Times of packed language models, forward plus backward: eager and the plugin's graphs.

python scripts/performance/bench_packed.py --out docs/benchmarks/packed.jsonl
python scripts/performance/bench_packed.py --models "" --plans --cost-model docs/benchmarks/costs.json

Measures every model at every pack, graphs of every layer's parts, of all layers with their experts, and graphs that
allow four times the documents there are, each model in a process of its own; they import side by side and have the GPU
one after the other. `--cost-model` fits the planner's cost model, `--plans` also measures what the planner predicts,
for three distributions. Times are of default algorithms; under deterministic ones graphs must equal eager to the bit. A
record is written as soon as it is measured; after `--seconds` no further pack begins.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.graphs.errors import CaptureError, OutOfMemoryInCapture  # noqa: E402
from bridge_cg_plugin.language.packed.fit import pack_buckets  # noqa: E402
from bridge_cg_tools.planner.plan import place  # noqa: E402
from examples.photographs.processes import TrainingFailed, TrainingProcess  # noqa: E402
from scripts.performance.packed_plans import DISTRIBUTIONS, Distribution  # noqa: E402
from scripts.performance.packed_plans import misses as plan_misses  # noqa: E402
from scripts.performance.packed_plans import records_of as plan_records  # noqa: E402
from scripts.performance.results import first_line, output_path, provenance, put_record, read_records  # noqa: E402

MODULE = "scripts.performance.bench_packed"
TOKENS = (2048, 4096, 8192)
DOCUMENTS = 5
# Aims: eager's time over graphs' time, by model, at each of TOKENS.
WANTED = {
    "dense": (2.5, 1.6, 1.2),
    "moe": (2.0, 1.7, 1.3),
    "large": (0.99, 0.99, 0.99),
    "mamba": (2.0, 0.99, 0.99),
}
# mamba needs packages that are compiled.
DEFAULT_MODELS = ("dense", "moe", "large")
STACK = (
    "megatron.core.extensions.transformer_engine",
    "megatron.core.models.gpt.gpt_model",
    "bridge_cg_plugin.upstream.hooks.packed_helper",
)
# The model that the planner's predictions are measured with, and the case that measures them.
PLANNED, PLANS = "planned", "plans"
# Parts of layers that a model's graphs have; all layers as one region where none are named.
MODULES = {"moe": ("attn", "moe_router")}
# Models of which all layers are one region, too, experts included. Products of experts round otherwise there than
# eager's: tests/gpu/test_captured_experts.py compares them.
WITH_EXPERTS = ("moe",)
# Those that become a region each, where all layers could be one.
LAYER_MODULES = {"mamba": ("attn", "mlp", "mamba")}
USUAL_LAYER_MODULES = ("attn", "mlp")
MOST_PADDING_COST = 1.03
# Seconds that a process has; one that hangs must not keep the others.
LIMIT_S = 240.0
# Runs that say what eager differs from itself by where it cannot be made to add up in one order, and an odd count of
# replays. The eager ones' gradients are all kept: 12 GB each of the large model.
NOISE_RUNS, REPLAYS = 4, 5
NOISE = 1.5
# Gradients are compared relative to their norm, or to this share of the largest norm of all: those of experts that few
# tokens go to may be zero in one run and not in another.
LEAST_NORM = 1e-3
# Packs of other shapes, that tell the parts of the cost model apart: (tokens, documents).
SHAPES = ((1024, 1), (2048, 1), (2048, 32), (4096, 1), (4096, 64), (8192, 1), (8192, 16), (8192, 128))
COST_REPEATS = 5
PLAN_REPEATS = 3

Records = list[dict[str, Any]]


def main() -> int:
    """Measure, write the records, print a table; non-zero when something wanted is missed or was not measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="docs/benchmarks/packed.jsonl if left out")
    parser.add_argument("--cost-model", type=Path, help="write the fitted cost model here")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=600.0, help="no further pack begins after this long")
    models = f"comma-separated, of {', '.join(WANTED)}, or empty"
    parser.add_argument("--models", default=",".join(DEFAULT_MODELS), help=models)
    parser.add_argument("--fused-rope", action="store_true", help="eager rotates with Transformer Engine's kernel")
    parser.add_argument("--plans", action="store_true", help="measure the planner's predictions, too")
    args = parser.parse_args()
    out = output_path(args.out, "packed.jsonl").resolve()
    words = ["--records", str(out), "--repeats", str(args.repeats), *(["--fused-rope"] * args.fused_rope)]
    cases = [model for model in args.models.split(",") if model]
    if args.plans or args.cost_model:
        cases.append(PLANS)
        words += ["--plans"] * args.plans
        words += ["--cost-model", str(args.cost_model.resolve())] if args.cost_model else []
    records, missed = run_cases(cases, words, args.seconds, out)
    missed = [*failures(records), *missed]
    print("\n".join(missed) or f"all {len(records)} records inside their limits")
    return 1 if missed else 0


def run_cases(cases: Sequence[str], words: Sequence[str], seconds: float, out: Path) -> tuple[Records, list[str]]:
    """Run every case in a process of its own; returns the records, and why packs or cases have none.

    Args:
        cases: Models, or `PLANS`.
        words: Further words of every process's command line.
        seconds: No further pack begins after this long.
        out: File that the processes write records to; what one measured before it failed counts.
    """
    before = read_records(out)
    missed = []
    with ExitStack() as stack:
        processes = {}
        for case in cases:
            processes[case] = TrainingProcess(prepare=f"{MODULE}:import_stack", module=MODULE)
            stack.callback(processes[case].close)
        end = time.monotonic() + seconds
        for case, process in processes.items():
            try:
                process.wait_until_ready()
                left = ["--seconds", f"{end - time.monotonic():.1f}"]
                missed += process.train("graphs", ["--case", case, *left, *words], LIMIT_S)["missed"]
            except TrainingFailed as error:
                missed.append(f"{case}: {first_line(error)}")
    return [record for record in read_records(out) if record not in before], missed


def import_stack() -> None:
    """Import what a case needs, before its turn."""
    for name in STACK:
        importlib.import_module(name)


def train_words(words: Sequence[str]) -> None:
    """Measure one case in this process: write its records as they come, and what was not measured to `--out`."""
    parser = argparse.ArgumentParser(prog="bench_packed", description=__doc__.splitlines()[0])
    parser.add_argument("--train", choices=("graphs",), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--case", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--fused-rope", action="store_true")
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--cost-model", type=Path)
    args = parser.parse_args(words)

    from scripts.performance import tower
    from scripts.performance.tilings import compiled_side_by_side

    end = time.monotonic() + args.seconds
    tower.start_process()
    missed = []
    with compiled_side_by_side():
        for record in measured(args, end):
            if isinstance(record, str):
                print(record, flush=True)
                missed.append(record)
            else:
                put_record(args.records, record)
    args.out.write_text(json.dumps({"missed": missed}))


def measured(args: argparse.Namespace, end: float) -> Iterator[dict[str, Any] | str]:
    """Yield the records of the case that a command line names, and why parts of it have none; the others go on.

    Args:
        args: Of the process.
        end: Of `time.monotonic`; no further pack begins after it.
    """
    parts = _plan_parts(args) if args.case == PLANS else _model_parts(args)
    for name, part in parts:
        if time.monotonic() > end:
            yield f"{name}: not measured, --seconds were over"
            continue
        try:
            yield from part()
        except Exception as error:
            yield f"{name}: {first_line(error)}"


# What is measured at once, by name.
Parts = Iterator[tuple[str, Callable[[], Iterator[dict[str, Any]]]]]


def _model_parts(args: argparse.Namespace) -> Parts:
    bench = Bench(args.case, args.repeats, args.fused_rope)
    for tokens in TOKENS:
        yield f"{args.case}_{tokens}", partial(bench.pack, tokens)
        bench.free_memory()


def _plan_parts(args: argparse.Namespace) -> Parts:
    bench = Bench(PLANNED, args.repeats, args.fused_rope)
    cost = bench.fit_costs(args.cost_model)
    for name in DISTRIBUTIONS if args.plans else ():
        yield f"plan_{name}", partial(bench.plan, Distribution(name, cost))


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
        self.name, self.repeats, self._began = name, repeats, time.monotonic()
        shape = dataclasses.replace(language_model.SHAPES[name], fused_rope=fused_rope)
        self.model = language_model.build_model(shape)
        self.grads = tower.MainGrads(self.model)
        self.modules = MODULES.get(name, ())

    def pack(self, tokens: int) -> Iterator[dict[str, Any]]:
        """Measure a pack eager, on graphs, on graphs for four times its documents and on those of layers' parts."""
        pack = self.lm.make_pack(self.lm.split(tokens, DOCUMENTS))
        eager = {**self._timed(pack, "eager"), "ratio": 1.0, **self._profiled(pack)}
        self._show(eager)
        yield eager
        for mode, most, modules in self._modes(tokens):
            try:
                parity = self._parity(pack, most, modules) if mode == "plugin" else {}
                helper = self._helper(pack, most, modules)
            except CaptureError as error:
                yield self._failed(pack, mode, error)
                continue
            timed = self._timed(pack, mode)
            statistics = helper.graphs.statistics()
            helper.delete_cuda_graphs()
            record = {
                **timed,
                **parity,
                "bucket": tokens,
                "aim": aim_of(self.name, tokens),
                "max_packed_seqs": most,
                "slots": 1,
                "ratio": timed["ms"] / eager["ms"],
                "memory_gb": statistics.memory_bytes / 2**30,
                "capture_s": statistics.capture_seconds,
                "fallbacks": dict(statistics.fallbacks),
            }
            self._show(record)
            yield record

    def _profiled(self, pack: Any) -> dict[str, Any]:
        """Return eager's peak of activations, and for how long its kernels keep the GPU busy."""
        from scripts.performance.group import PeakMemory

        peak = PeakMemory()
        self._step(pack)
        memory = peak.read()
        kernels = self.measure.profile(lambda: self._step(pack))
        return {"eager_memory_gb": memory, "gpu_busy_ms": kernels.busy_ms, "kernels": kernels.count}

    def _parity(self, pack: Any, most: int, modules: Sequence[str] | None) -> dict[str, Any]:
        """Compare graphs with eager: to the bit where everything can be made to add up in one order.

        That takes cuDNN's attention memory that grows with the square of the tokens.
        """
        import torch

        try:
            with self.parity.deterministic(self.model):
                return self._to_the_bit(pack, most, modules)
        except (torch.OutOfMemoryError, CaptureError) as error:
            if isinstance(error, CaptureError) and not isinstance(error.__cause__, OutOfMemoryInCapture):
                raise
            print(f"{self.name}_{pack.tokens}: not compared to the bit: {first_line(error)}", flush=True)
        self.free_memory()
        return self._within_noise(pack, most, modules)

    def _to_the_bit(self, pack: Any, most: int, modules: Sequence[str] | None) -> dict[str, Any]:
        runs = [self._results(pack) for _ in range(2)]
        self.free_memory()
        (found,) = self._replayed(pack, most, modules, 1)
        losses, gradients = self.parity.nearest(found, runs[:1])
        forward_noise, grad_noise = self.parity.noise_of(runs)
        return {
            "bit_equal": self.parity.same(found, runs[0]),
            "forward_rel": losses,
            "grad_rel": gradients,
            "forward_noise": forward_noise,
            "grad_noise": grad_noise,
        }

    def _within_noise(self, pack: Any, most: int, modules: Sequence[str] | None) -> dict[str, Any]:
        """Compare how far runs are from the nearest other eager run: the middle replay, the farthest eager run."""
        runs = [self._results(pack) for _ in range(NOISE_RUNS)]
        spread = self.parity.spread_of(runs, self._replayed(pack, most, modules, REPLAYS), LEAST_NORM)
        return {
            "forward_rel": spread.graphs[:, 0].median().item(),
            "grad_rel": spread.graphs[:, 1:].amax(1).median().item(),
            "forward_noise": spread.eager[:, 0].max().item(),
            "grad_noise": spread.eager[:, 1:].max().item(),
        }

    def _replayed(self, pack: Any, most: int, modules: Sequence[str] | None, runs: int) -> Iterator[Any]:
        """Yield what so many replays give; then nothing of the graphs is left."""
        helper = self._helper(pack, most, modules)
        try:
            for _ in range(runs):
                yield self._results(pack)
            statistics = helper.graphs.statistics()
        finally:
            helper.delete_cuda_graphs()
        assert statistics.replays and not statistics.fallbacks, statistics

    def free_memory(self) -> None:
        """Give back what a pack of another size, or other algorithms, cannot use."""
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()

    def _modes(self, tokens: int) -> Iterator[tuple[str, int, Sequence[str] | None]]:
        """Yield name, documents allowed and parts of layers; None are all parts of every layer, each a region.

        Their launches are as many for every size, and show most for the smallest.
        """
        yield "plugin", DOCUMENTS, self.modules
        yield "plugin_4x", 4 * DOCUMENTS, self.modules
        if self.name in WITH_EXPERTS:
            yield "plugin_whole", DOCUMENTS, ()
        if not self.modules and tokens == min(TOKENS):
            yield "plugin_layers", DOCUMENTS, None

    def fit_costs(self, out: Path | None) -> Any:
        """Return the cost model that fits packs of several shapes, eager and on graphs, and write it."""
        from bridge_cg_tools.planner.cost import save_cost_model
        from scripts.performance.packed_costs import fit

        shapes = (*SHAPES, *((tokens, DOCUMENTS) for tokens in TOKENS))
        packs = [self._measured(self.lm.make_pack(self.lm.split(tokens, count))) for tokens, count in shapes]
        made = provenance(COST_REPEATS, 0)
        origin = f"bench_packed.py, {self.name}, {made['gpu']}, {made['date']}, commit {made['versions']['commit']}"
        cost = fit(packs, origin)
        for pack in packs:
            found = f"eager {pack.eager_ms:.1f} ms (GPU {pack.busy_ms:.1f}), graphs {pack.graphs_ms:.1f} ms"
            fitted = f"eager {cost.eager_ms(pack.lengths):.1f} ms, graphs "
            fitted += f"{cost.graph_ms(pack.tokens, pack.lengths, *pack.limits):.1f} ms"
            print(f"{pack.tokens} tokens, {len(pack.lengths)} documents: {found}; fitted {fitted}", flush=True)
        print(f"cost model: {cost}", flush=True)
        if out is not None:
            save_cost_model(out, "packed", cost)
        return cost

    def _measured(self, pack: Any) -> Any:
        from scripts.performance.packed_costs import Measured

        eager = self._times(pack, COST_REPEATS).ms
        busy = self.measure.profile(lambda: self._step(pack)).busy_ms
        helper = self._helper(pack, len(pack.lengths), self.modules)
        graphs = self._times(pack, COST_REPEATS).ms
        statistics = helper.graphs.statistics()
        helper.delete_cuda_graphs()
        assert statistics.replays and not statistics.fallbacks, statistics
        (bucket,) = statistics.buckets
        return Measured(pack.lengths, bucket.limits, eager, busy, graphs, statistics.memory_bytes / 2**20)

    def plan(self, found: Distribution) -> Iterator[dict[str, Any]]:
        """Measure the recommended choice alone, and every choice that the planner could have made."""
        packs = [self.lm.make_pack(pack, seed) for seed, pack in enumerate(found.drawn)]
        case = f"plan_{found.name}"
        options = {
            "cuda_graph_max_packed_seqs": found.best.max_packed_seqs,
            "cuda_graph_packed_buckets": list(found.best.buckets),
        }
        helper = self._new_helper(packs[0], **options)
        alone = sum(self._times(pack, PLAN_REPEATS, warmup=1).ms for pack in packs) / len(packs)
        fallbacks = dict(helper.graphs.statistics().fallbacks)
        helper.delete_cuda_graphs()
        choices = self._exhaustive(found, packs)
        origin = provenance(PLAN_REPEATS, 0)
        for record in plan_records(case, found, alone, choices):
            if record["mode"] == "plugin":
                record["fallbacks"] = fallbacks
            said = f"predicted {record['predicted_ms']:.1f} ms, measured {record['ms']:.1f} ms"
            print(f"{case} {record['mode']}: up to {record['max_packed_seqs']} documents, {said}", flush=True)
            yield {**record, **origin}

    def _exhaustive(self, found: Distribution, packs: Sequence[Any]) -> dict[Any, float]:
        """Return the time of every choice, from one capture of all recordings that one of them needs."""
        needed = sorted({each for row in found.places().values() for each in row if each is not None})
        options = {
            "cuda_graph_max_packed_seqs": max(documents for _, (documents, _) in needed),
            "cuda_graph_packed_buckets": sorted({bucket.tokens for bucket in needed}),
        }
        helper = self._new_helper(packs[0], recorded=needed, **options)
        (region,) = helper.graphs._regions

        def run(number: int, each: Any) -> float:
            if each is None:
                with helper.graphs.paused():
                    return self._times(packs[number], PLAN_REPEATS, warmup=1).ms
            region.buckets = (each,)
            return self._times(packs[number], PLAN_REPEATS, warmup=1).ms

        choices = found.measured(run)
        assert not helper.graphs.statistics().fallbacks, helper.graphs.statistics().fallbacks
        helper.delete_cuda_graphs()
        return choices

    def _helper(self, pack: Any, most: int, modules: Sequence[str] | None) -> Any:
        """Capture for packs of up to `most` documents, of all bounds the one that this pack takes."""
        return self._new_helper(
            pack,
            recorded=[place(pack.lengths, pack_buckets([pack.tokens], most))],
            modules=LAYER_MODULES.get(self.name, USUAL_LAYER_MODULES) if modules is None else modules,
            by_layer=modules is None,
            cuda_graph_max_packed_seqs=most,
            cuda_graph_packed_buckets=[pack.tokens],
        )

    def _new_helper(self, pack: Any, **options: Any) -> Any:
        once = {"cuda_graph_packed_tuning": {"slots": 1, "evaluation": False}}
        return self.lm.new_helper(self.model, pack, **once, **options)

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
        if record["mode"] == "eager":
            extra = f", GPU busy {record['gpu_busy_ms']:.1f} ms, {record['kernels']} kernels"
        else:
            extra = f", {1 / record['ratio']:.2f} times as fast, {record['memory_gb']:.1f} GiB"
        if "grad_rel" in record:
            extra += ", equal to the bit" if record.get("bit_equal") else f", {_difference(record)}"
        at = f"[{time.monotonic() - self._began:.0f} s]"
        print(f"{record['case']:10} {record['mode']:13} {record['ms']:>7.1f} ms{extra} {at}", flush=True)


def _difference(record: dict[str, Any]) -> str:
    """Return how far graphs are from eager, and eager from itself."""
    losses = f"losses differ by {record['forward_rel']:.2e}, eager runs by {record['forward_noise']:.2e}"
    return f"{losses}; gradients by {record['grad_rel']:.2e}, eager runs by {record['grad_noise']:.2e}"


def _is_eagers(record: dict[str, Any]) -> bool:
    """Whether graphs gave what eager gives: to the bit, or no farther from it than it is from itself."""
    if "bit_equal" in record:
        return record["bit_equal"]
    near = (record[f"{kind}_rel"] <= NOISE * record[f"{kind}_noise"] for kind in ("forward", "grad"))
    return all(near)


def aim_of(model: str, tokens: int) -> float:
    """Return how many times as fast as eager graphs must be."""
    return WANTED[model][TOKENS.index(tokens)]


def failures(records: Records) -> list[str]:
    """Return what misses what is wanted."""
    measured = {(r["case"], r["mode"]): r for r in records if not r["case"].startswith("plan_")}
    missed = [miss for r in measured.values() if r["mode"] != "eager" for miss in _misses(r, measured)]
    for case in dict.fromkeys(r["case"] for r in records if r["case"].startswith("plan_")):
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
        yield f"{case}: {_difference(r)}"
    plugin = measured.get((case, "plugin"), r)
    if mode == "plugin_4x" and r["ms"] > MOST_PADDING_COST * plugin.get("ms", r["ms"]):
        yield f"{case}: four times the documents cost more than 3 %: {r['ms']:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
