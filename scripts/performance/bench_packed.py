"""Times of packed language models, forward plus backward: eager and the plugin's graphs, with parity beside them.

    python scripts/performance/bench_packed.py
    python scripts/performance/bench_packed.py --models fp8,mamba --tokens 2048,4096

Measures every model at every pack: graphs of all layers, or of attention and routers where experts run eager; with room
for four times the documents; of all layers with their experts; and of every layer's parts. Times are of default
algorithms; under deterministic ones graphs must equal eager to the bit, or be within its noise where memory does not
suffice. A record is written as soon as it is measured. Status 1 if graphs do not give what eager gives.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from bridge_cg_plugin.attention_bounds import pack_buckets
from bridge_cg_plugin.cli.planner.command import place
from bridge_cg_plugin.cli.runs.results import provenance
from bridge_cg_plugin.graphs.errors import CaptureError, OutOfMemoryInCapture
from scripts.performance.measure import GIB, PeakMemory, collect, median_times, profile
from scripts.performance.records import at_least, first_line, names_of, output_path, put_record
from tests.models import language_model as lm
from tests.models import packed_parity as parity
from tests.models import tower
from tests.models.tilings import compiled_side_by_side

DOCUMENTS = 5
TOKENS = (2048, 4096, 8192)
MODELS = ("dense", "fp8", "moe", "large", "mamba")
DEFAULT_MODELS = ("dense", "moe", "large")  # fp8 rounds otherwise, mamba needs packages that are compiled
# Parts of layers that a model's graphs have; all layers as one region where none are named.
MODULES = {"moe": ("attn", "moe_router")}
# Models of which all layers are one region, too, experts included.
WITH_EXPERTS = ("moe",)
# Parts that become a region each, where all layers could be one.
LAYER_MODULES = {"mamba": ("attn", "mlp", "mamba")}
USUAL_LAYER_MODULES = ("attn", "mlp")
# Eager runs that say how far eager is from itself, and replays that are held against them.
NOISE_RUNS, REPLAYS, NOISE = 4, 5, 1.5
# Gradients are compared relative to their norm, or to this share of the largest norm of all: those of experts that few
# tokens go to may be zero in one run and not in another.
LEAST_NORM = 1e-3

Record = dict[str, Any]


class Bench:
    """One model.

    Args:
        name: Of `MODELS`.
        repeats: Timed runs of each measurement.
    """

    def __init__(self, name: str, repeats: int) -> None:
        self.name, self.repeats = name, repeats
        self.model = lm.build_model(lm.SHAPES[name])
        self.grads = tower.MainGrads(self.model)
        self.modules = MODULES.get(name, ())

    def records(self, tokens: int) -> Iterator[Record]:
        """Measure a pack eager and on every kind of graphs."""
        pack = lm.make_pack(lm.split(tokens, DOCUMENTS))
        eager = {**self._timed(pack, "eager"), "ratio": 1.0, **self._profiled(pack)}
        yield eager
        for mode, most, modules in self._modes(tokens):
            try:
                found = self._parity(pack, most, modules) if mode == "plugin" else {}
                helper = self._helper(pack, most, modules)
            except CaptureError as error:
                yield {**self._head(pack, mode), "error": first_line(error), **provenance(0, 0)}
                continue
            timed = self._timed(pack, mode)
            statistics = helper.graphs.statistics()
            helper.delete_cuda_graphs()
            yield {
                **timed,
                **found,
                "bucket": tokens,
                "max_packed_seqs": most,
                "slots": 1,
                "ratio": timed["ms"] / eager["ms"],
                "memory_gb": statistics.memory_bytes / GIB,
                "capture_s": statistics.capture_seconds,
                "fallbacks": dict(statistics.fallbacks),
            }

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

    def _profiled(self, pack: lm.Pack) -> Record:
        """Return eager's peak of activations, and for how long its kernels keep the GPU busy."""
        peak = PeakMemory()
        lm.step(self.model, pack)
        memory = peak.read()
        kernels = profile(lambda: lm.step(self.model, pack))
        return {"eager_memory_gb": memory, "gpu_busy_ms": kernels.busy_ms, "kernels": kernels.count}

    def _parity(self, pack: lm.Pack, most: int, modules: Sequence[str] | None) -> Record:
        """Compare graphs with eager: to the bit where everything can be made to add up in one order.

        That takes cuDNN's attention memory that grows with the square of the tokens.
        """
        try:
            with parity.deterministic(self.model):
                return self._to_the_bit(pack, most, modules)
        except (torch.OutOfMemoryError, CaptureError) as error:
            if isinstance(error, CaptureError) and not isinstance(error.__cause__, OutOfMemoryInCapture):
                raise
            print(f"{self.name}_{pack.tokens}: not compared to the bit: {first_line(error)}", flush=True)
        collect()
        return self._within_noise(pack, most, modules)

    def _to_the_bit(self, pack: lm.Pack, most: int, modules: Sequence[str] | None) -> Record:
        runs = [self._results(pack) for _ in range(2)]
        collect()
        (found,) = self._replayed(pack, most, modules, 1)
        losses, gradients = parity.nearest(found, runs[:1])
        forward_noise, grad_noise = parity.noise_of(runs)
        return {
            "bit_equal": parity.same(found, runs[0]),
            "forward_rel": losses,
            "grad_rel": gradients,
            "forward_noise": forward_noise,
            "grad_noise": grad_noise,
        }

    def _within_noise(self, pack: lm.Pack, most: int, modules: Sequence[str] | None) -> Record:
        """Compare how far runs are from the nearest other eager run: the middle replay, the farthest eager run."""
        runs = [self._results(pack) for _ in range(NOISE_RUNS)]
        spread = parity.spread_of(runs, self._replayed(pack, most, modules, REPLAYS), LEAST_NORM)
        return {
            "forward_rel": spread.graphs[:, 0].median().item(),
            "grad_rel": spread.graphs[:, 1:].amax(1).median().item(),
            "forward_noise": spread.eager[:, 0].max().item(),
            "grad_noise": spread.eager[:, 1:].max().item(),
        }

    def _replayed(self, pack: lm.Pack, most: int, modules: Sequence[str] | None, runs: int) -> Iterator[parity.Result]:
        """Yield what so many replays give; then nothing of the graphs is left."""
        helper = self._helper(pack, most, modules, exact=True)
        try:
            for _ in range(runs):
                yield self._results(pack)
            statistics = helper.graphs.statistics()
        finally:
            helper.delete_cuda_graphs()
        assert statistics.replays and not statistics.fallbacks, statistics

    def _helper(self, pack: lm.Pack, most: int, modules: Sequence[str] | None, exact: bool = False) -> Any:
        """Capture for packs of up to `most` documents, of all bounds the one that this pack takes."""
        options: dict[str, Any] = {
            "cuda_graph_max_packed_seqs": most,
            "cuda_graph_packed_buckets": [pack.tokens],
            "cuda_graph_packed_slots": 1,
        }
        bucket: Any = place(pack.lengths, pack_buckets([pack.tokens], most))
        parts = LAYER_MODULES.get(self.name, USUAL_LAYER_MODULES) if modules is None else modules
        return lm.new_helper(
            self.model, pack, exact=exact, recorded=[bucket], modules=parts, by_layer=modules is None, **options
        )

    def _results(self, pack: lm.Pack) -> parity.Result:
        self.grads.zero()
        losses = lm.step(self.model, pack)
        return losses, self.grads.copy()

    def _head(self, pack: lm.Pack, mode: str) -> Record:
        return {
            "case": f"{self.name}_{pack.tokens}",
            "mode": mode,
            "tokens": pack.tokens,
            "documents": len(pack.lengths),
        }

    def _timed(self, pack: lm.Pack, mode: str) -> Record:
        run: Callable[..., object] = lambda between: lm.step(self.model, pack, between)  # noqa: E731
        times = median_times(run, self.repeats)
        fields = {"ms": times.ms, "fwd_ms": times.fwd_ms, "host_ms": times.host_ms}
        return {**self._head(pack, mode), **fields, **provenance(times.repeats, 0)}


def missed(record: Record) -> str:
    """Return where graphs did not give what eager gives, or ran eager; empty where all is well."""
    case = f"{record['case']}, {record['mode']}"
    if "error" in record or record.get("fallbacks"):
        return f"{case}: {record.get('error') or record['fallbacks']}"
    if record.get("bit_equal", "grad_rel" not in record):
        return ""
    near = (record[f"{kind}_rel"] <= NOISE * record[f"{kind}_noise"] for kind in ("forward", "grad"))
    if "bit_equal" not in record and all(near):
        return ""
    return (
        f"{case}: losses differ by {record['forward_rel']:.2e}, eager runs by {record['forward_noise']:.2e}; "
        f"gradients by {record['grad_rel']:.2e}, eager runs by {record['grad_noise']:.2e}"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/packed.jsonl on a GPU")
    parser.add_argument("--models", type=names_of(*MODELS), default=DEFAULT_MODELS, help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tokens", type=names_of(*map(str, TOKENS)), default=tuple(map(str, TOKENS)), help="of a pack")
    parser.add_argument("--repeats", type=at_least(3), default=15, help="timed runs of each measurement")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the records and print them."""
    args = parse(arguments)
    out = output_path(args.out, "packed.jsonl")
    tower.start_process()
    misses = []
    with compiled_side_by_side():
        for name in args.models:
            bench = Bench(name, args.repeats)
            for tokens in map(int, args.tokens):
                for record in bench.records(tokens):
                    put_record(out, record)
                    misses.append(missed(record))
                    said = record.get("error") or f"{record['ms']:.1f} ms, ratio {record['ratio']:.2f}"
                    print(f"{record['case']}, {record['mode']}: {said}", flush=True)
                collect()
            del bench
            collect()
    print("\n".join(filter(None, misses)) or "graphs give what eager gives")
    return 1 if any(misses) else 0


if __name__ == "__main__":
    sys.exit(main())
