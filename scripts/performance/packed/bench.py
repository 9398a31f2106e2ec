"""Times and parity of a packed language model, eager and on graphs."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.planner.cost import CostModel, save_cost_model
from bridge_cg_plugin.cli.planner.plan import place
from bridge_cg_plugin.cli.planner.rates import cost_of, language_model_rates
from bridge_cg_plugin.cli.planner.shapes import Ranks
from bridge_cg_plugin.cli.runs.results import first_line, provenance
from bridge_cg_plugin.graphs.errors import CaptureError, OutOfMemoryInCapture
from bridge_cg_plugin.language.packed.fit import pack_buckets
from scripts.performance.packed.costs import Measured, fit
from scripts.performance.packed.limits import TOKENS, aim_of, difference
from scripts.performance.packed.plans import COSTS, PLAN, Distribution
from scripts.performance.packed.plans import records_of as plan_records

DOCUMENTS = 5
# Parts of layers that a model's graphs have; all layers as one region where none are named.
MODULES = {"moe": ("attn", "moe_router")}
# Models of which all layers are one region, too, experts included. Products of experts round otherwise there than
# eager's: tests/gpu/test_captured_experts.py compares them.
WITH_EXPERTS = ("moe",)
# Those that become a region each, where all layers could be one.
# The model that the planner's predictions are measured with where none is named.
PLANNED = "planned"
LAYER_MODULES = {"mamba": ("attn", "mlp", "mamba")}
USUAL_LAYER_MODULES = ("attn", "mlp")
# Runs that say what eager differs from itself by where it cannot be made to add up in one order, and an odd count of
# replays. The eager ones' gradients are all kept: 12 GB each of the large model.
NOISE_RUNS, REPLAYS = 4, 5
# Gradients are compared relative to their norm, or to this share of the largest norm of all: those of experts that few
# tokens go to may be zero in one run and not in another.
LEAST_NORM = 1e-3
# Packs of other shapes, that tell the parts of the cost model apart: (tokens, documents).
SHAPES = ((1024, 1), (2048, 1), (2048, 32), (4096, 1), (4096, 64), (8192, 1), (8192, 16), (8192, 128))
COST_REPEATS = 3
PLAN_REPEATS = 3


class Bench:
    """One model, its packs and what eager gave for each.

    Args:
        name: Of the model.
        repeats: Timed runs of each measurement.
        fused_rope: Whether eager rotates with Transformer Engine's kernel.
    """

    def __init__(self, name: str, repeats: int, fused_rope: bool) -> None:
        import dataclasses

        from scripts.performance.measuring import measure
        from scripts.performance.models import language_model, tower
        from scripts.performance.packed import parity as packed_parity

        self.lm, self.tower, self.measure, self.parity = language_model, tower, measure, packed_parity
        self.name, self.repeats, self._began = name, repeats, time.monotonic()
        shape = dataclasses.replace(language_model.SHAPES[name], fused_rope=fused_rope)
        self.model = language_model.build_model(shape)
        self.grads = tower.MainGrads(self.model)
        self.modules = MODULES.get(name, ())
        self._packs: list[Measured] = []

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
        from scripts.performance.measuring.memory import PeakMemory

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
        helper = self._helper(pack, most, modules, exact=True)
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

    def forecast(self) -> CostModel:
        """Return the cost model that the planner has for a model of these sizes."""
        return cost_of(self.lm.sizes_of(self.lm.SHAPES[self.name]), Ranks(), language_model_rates())

    def costs(self) -> Iterator[dict[str, Any]]:
        """Measure packs of several shapes, eager and on graphs of all layers, beside the planner's forecast."""
        cost = self.forecast()
        for tokens, count in (*SHAPES, *((tokens, DOCUMENTS) for tokens in TOKENS)):
            pack = self.lm.make_pack(self.lm.split(tokens, count))
            found = self._measured(pack)
            self._packs.append(found)
            graphs_ms = cost.graph_ms(pack.tokens, pack.lengths, *found.limits)
            said = {"case": f"{COSTS}{self.name}_{tokens}x{count}", "tokens": tokens, "documents": count}
            said |= provenance(COST_REPEATS, 0)
            eager = {**said, "mode": "eager", "ms": found.eager_ms, "gpu_busy_ms": found.busy_ms, "ratio": 1.0}
            graphs = {**said, "mode": "plugin", "ms": found.graphs_ms, "ratio": found.graphs_ms / found.eager_ms}
            graphs |= {"bucket": tokens, "slots": 1, "memory_gb": found.memory_mb / 1024, "fallbacks": {}}
            for record, predicted in ((eager, cost.eager_ms(pack.lengths)), (graphs, graphs_ms)):
                print(
                    f"{record['case']}, {record['mode']}: {record['ms']:.1f} ms, forecast {predicted:.1f}", flush=True
                )
                yield {**record, "predicted_ms": predicted}
            self.free_memory()

    def fit_costs(self, out: Path) -> CostModel:
        """Return the cost model that fits the packs of `costs`, and write it."""
        made = provenance(COST_REPEATS, 0)
        origin = f"bench_packed.py, {self.name}, {made['gpu']}, {made['date']}, commit {made['versions']['commit']}"
        cost = fit(self._packs, origin)
        save_cost_model(out, "packed", cost)
        return cost

    def _measured(self, pack: Any) -> Measured:
        eager = self._times(pack, COST_REPEATS, warmup=1).ms
        busy = self.measure.profile(lambda: self._step(pack)).busy_ms
        helper = self._helper(pack, len(pack.lengths), ())
        graphs = self._times(pack, COST_REPEATS).ms
        statistics = helper.graphs.statistics()
        helper.delete_cuda_graphs()
        assert statistics.replays and not statistics.fallbacks, statistics
        (bucket,) = statistics.buckets
        return Measured(pack.lengths, bucket.limits, eager, busy, graphs, statistics.memory_bytes / 2**20)

    def plan(self, found: Distribution) -> Iterator[dict[str, Any]]:
        """Measure the recommended choice alone, and every choice that the planner could have made."""
        packs = [self.lm.make_pack(pack, seed) for seed, pack in enumerate(found.drawn)]
        case = f"{PLAN}{found.name}" if self.name == PLANNED else f"{PLAN}{self.name}_{found.name}"
        options: dict[str, Any] = {
            "cuda_graph_max_packed_seqs": found.best.max_packed_seqs,
            "cuda_graph_packed_buckets": list(found.best.buckets),
        }
        helper = self._new_helper(packs[0], **options)
        alone = sum(map(self._ms, packs)) / len(packs)
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
        options: dict[str, Any] = {
            "cuda_graph_max_packed_seqs": max(documents for _, (documents, _) in needed),
            "cuda_graph_packed_buckets": sorted({bucket.tokens for bucket in needed}),
        }
        helper = self._new_helper(packs[0], recorded=needed, **options)
        (region,) = helper.graphs._regions

        def run(number: int, each: Any) -> float:
            if each is None:
                with helper.graphs.paused():
                    return self._ms(packs[number])
            region.buckets = (each,)
            return self._ms(packs[number])

        choices = found.measured(run)
        assert not helper.graphs.statistics().fallbacks, helper.graphs.statistics().fallbacks
        helper.delete_cuda_graphs()
        return choices

    def _helper(self, pack: Any, most: int, modules: Sequence[str] | None, exact: bool = False) -> Any:
        """Capture for packs of up to `most` documents, of all bounds the one that this pack takes."""
        return self._new_helper(
            pack,
            exact=exact,
            recorded=[place(pack.lengths, pack_buckets([pack.tokens], most))],
            modules=LAYER_MODULES.get(self.name, USUAL_LAYER_MODULES) if modules is None else modules,
            by_layer=modules is None,
            cuda_graph_max_packed_seqs=most,
            cuda_graph_packed_buckets=[pack.tokens],
        )

    def _new_helper(self, pack: Any, exact: bool = False, **options: Any) -> Any:
        once: dict[str, Any] = {"cuda_graph_packed_tuning": {"slots": 1, "evaluation": False}}
        return self.lm.new_helper(self.model, pack, exact=exact, **once, **options)

    def _step(self, pack: Any, between: Callable[[], object] | None = None) -> Any:
        return self.lm.step(self.model, pack, between)

    def _ms(self, pack: Any) -> float:
        ms: float = self._times(pack, PLAN_REPEATS, warmup=1).ms
        return ms

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
            extra += ", equal to the bit" if record.get("bit_equal") else f", {difference(record)}"
        at = f"[{time.monotonic() - self._began:.0f} s]"
        print(f"{record['case']:10} {record['mode']:13} {record['ms']:>7.1f} ms{extra} {at}", flush=True)
