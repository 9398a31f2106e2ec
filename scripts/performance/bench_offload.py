"""Memory against time of graphs whose activations are offloaded, recomputed, or both as a memory target asks.

    python scripts/performance/bench_offload.py
    python scripts/performance/bench_offload.py --cases 1x2048 --targets 0.5,0.3
    python scripts/performance/bench_offload.py --cases experts_8192 --modules attn,moe_router

Every mode replays the same batches on the same weights as `none`, the graph that keeps all activations. A case with
several slots runs as many forwards and then their backwards, as a pipeline's first stage does. `experts_8192` is a pack
through a mixture of experts of 16 layers, experts included; the other cases are images through the vision tower.
Records go to docs/benchmarks/offload.jsonl; a mode that fails has a record with the error.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from bridge_cg_plugin.cli.runs.results import provenance
from bridge_cg_plugin.options import VisionGraphOptions
from scripts.performance.measure import GIB, collect, median_times, profile
from scripts.performance.records import at_least, first_line, names_of, output_path, put_record
from tests.models import language_model as lm
from tests.models import tower
from tests.models.workloads import CASES, Grid, one_image, tokens_of

# Case -> slots.
SLOTS = {"1x2048": 1, "tokens_32768": 1, "8mix": 4, "experts_8192": 1}
# Mode -> options. Targets are parts of the memory of `none`.
FIXED: dict[str, dict[str, Any]] = {
    "none": {},
    "offload": {"offload": ("attention", "mlp", "layernorm", "merger", "other")},
    "recompute": {"recompute": ("layernorm", "gelu", "linear")},
}
TARGETS = (0.6, 0.4, 0.3, 0.25)
DOCUMENTS, PACK_TOKENS = 5, 8192
OFF = dict.fromkeys(f"cuda_graph_packed_{name}" for name in ("offload", "recompute", "offload_above_gb"))

Record = dict[str, Any]


@dataclass(slots=True)
class Case:
    """A model, its batches, and how they are run.

    Attributes:
        head: Fields of the case's records.
        model: The model.
        batches: One for each slot.
        new_helper: Captures with options, for a bucket of exactly the batches' size.
        forward: Returns a batch's outputs and their gradients.
    """

    head: Record
    model: Any
    batches: Sequence[Any]
    new_helper: Callable[[dict[str, Any]], Any]
    forward: Callable[[Any], tuple[list[Any], list[Any]]]

    def run(self, between: Callable[[], object] | None = None) -> list[Any]:
        """Run all forwards, then all backwards; returns all outputs. `between` is called between both."""
        made = [self.forward(batch) for batch in self.batches]
        if between is not None:
            between()
        for outputs, gradients in made:
            torch.autograd.backward(outputs, gradients)
        return [output.detach() for outputs, _ in made for output in outputs]

    @contextmanager
    def graphs(self, options: dict[str, Any]) -> Iterator[Any]:
        """Capture with options; nothing is left afterwards."""
        helper = self.new_helper(options)
        try:
            yield helper.graphs
        finally:
            helper.delete_cuda_graphs()
            collect()


def images(name: str, grid: Grid, slots: int) -> Case:
    """Return images through the vision tower, the same ones in each slot but for their pixels."""
    model = tower.build_tower()
    batches = [tower.make_batch(grid, model, seed=seed) for seed in range(slots)]
    settings: dict[str, Any] = {"buckets": (batches[0].tokens,), "slots": slots, "max_frames": batches[0].frames}
    settings |= {"impl": "transformer_engine", "strict": True, "exact_below": 0}

    def new_helper(options: dict[str, Any]) -> Any:
        return tower.new_helper(model, VisionGraphOptions(**settings, **options))

    def forward(batch: tower.Batch) -> tuple[list[Any], list[Any]]:
        return tower.forward(model, batch), batch.gradients

    head = {"case": name, "tokens": tokens_of(grid), "images": len(grid), "slots": slots}
    return Case(head, model, batches, new_helper, forward)


def packs(name: str, slots: int, modules: Sequence[str]) -> Case:
    """Return packs of random documents, as many as slots, through a mixture of experts."""
    model = lm.build_model(lm.SHAPES["moe"])
    batches = [lm.make_pack(lm.draw(PACK_TOKENS, DOCUMENTS, seed), seed) for seed in range(slots)]

    def new_helper(options: dict[str, Any]) -> Any:
        return lm.new_helper(
            model,
            batches[0],
            exact=False,
            modules=modules,
            cuda_graph_max_packed_seqs=2 * DOCUMENTS,
            cuda_graph_packed_buckets=[PACK_TOKENS],
            cuda_graph_packed_slots=slots,
            **{**OFF, **{f"cuda_graph_packed_{option}": value for option, value in options.items()}},
        )

    def forward(batch: lm.Pack) -> tuple[list[Any], list[Any]]:
        losses = model(**batch.arguments)
        return [losses], [batch.weights.to(losses.dtype)]

    head = {"case": case_of(name, modules), "tokens": PACK_TOKENS, "documents": DOCUMENTS, "slots": slots}
    return Case(head, model, batches, new_helper, forward)


def case_of(name: str, modules: Sequence[str]) -> str:
    """Return a case's name in records, with the parts of layers on graphs."""
    return "_".join((name, *modules))


def records(case: Case, modes: Sequence[str], targets: Sequence[float], repeats: int) -> Iterator[Record]:
    """Yield a record of every mode, `none` first."""
    grads = tower.MainGrads(case.model)
    asked: list[tuple[str, float | None]] = [(mode, None) for mode in FIXED if mode in modes or mode == "none"]
    asked += [(f"mixed_{round(100 * target)}", target) for target in targets]
    kept: Record = {}
    expected = None
    for mode, target in asked:
        options, told = FIXED.get(mode, {}), {}
        if target is not None:
            told = {"memory_target_gb": target * kept["memory_gb"]}
            options = {"offload_above_gb": told["memory_target_gb"] / len(case.batches)}
        head = {**case.head, "mode": mode, "bucket": case.head["tokens"]}
        try:
            record, found = measured(case, grads, options, repeats)
        except Exception as error:
            yield {**head, "error": first_line(error), **provenance(0, 0)}
            if mode == "none":
                return
            continue
        kept, expected = kept or record, expected or found
        record |= {"ratio": record["ms"] / kept["ms"], "memory_ratio": record["memory_gb"] / kept["memory_gb"]}
        record["bit_equal"] = all(map(torch.equal, found[0], expected[0]))
        record["grad_rel"] = tower.largest_relative(found[1], expected[1])
        yield {**head, **told, **record}


def measured(
    case: Case, grads: tower.MainGrads, options: dict[str, Any], repeats: int
) -> tuple[Record, tuple[list[Any], list[Any]]]:
    """Return a mode's record, and the outputs and gradients of one run, on the host."""

    def results() -> tuple[list[Any], list[Any]]:
        grads.zero()
        return [output.cpu() for output in case.run()], [gradient.cpu() for gradient in grads.copy()]

    with case.graphs(options) as graphs:
        found = results()
        noise = tower.largest_relative(results()[1], found[1])
        times = median_times(case.run, repeats, warmup=1)
        statistics = graphs.statistics()
        if statistics.fallbacks:
            raise RuntimeError(f"some batches ran eager: {dict(statistics.fallbacks)}")
        record = {
            "ms": times.ms,
            "fwd_ms": times.fwd_ms,
            "host_ms": times.host_ms,
            "gpu_busy_ms": profile(case.run).busy_ms,
            "memory_gb": statistics.memory_bytes / GIB,
            "pinned_gb": statistics.pinned_bytes / GIB,
            "capture_s": statistics.capture_seconds,
            "grad_noise": noise,
            "fallbacks": {},
            **provenance(times.repeats, 0),
        }
    return record, found


def summary(record: Record) -> str:
    """Return one line on a record."""
    head = f"{record['case']:13} {record['mode']:10}"
    if "error" in record:
        return f"{head} {record['error']}"
    return (
        f"{head} {record['ms']:8.1f} ms (x{record['ratio']:.3f}) {record['memory_gb']:6.2f} GiB "
        f"(x{record['memory_ratio']:.2f}), host {record['pinned_gb']:5.2f} GiB, outputs "
        f"{'equal' if record['bit_equal'] else 'DIFFER'}, gradients {record['grad_rel']:.1e} "
        f"(two runs {record['grad_noise']:.1e}), capture {record['capture_s']:.1f} s"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/offload.jsonl on a GPU")
    parser.add_argument("--cases", type=names_of(*SLOTS), default=tuple(SLOTS), help=f"of {', '.join(SLOTS)}")
    parser.add_argument("--modes", type=names_of(*FIXED), default=tuple(FIXED), help=f"of {', '.join(FIXED)}")
    parser.add_argument("--targets", type=parts, default=TARGETS, help="memory targets, parts of none's memory")
    parser.add_argument("--slots", type=at_least(1), help="microbatches in flight; the case's own by default")
    parser.add_argument("--modules", default="", help="parts of layers of packs on graphs; all layers without")
    parser.add_argument("--repeats", type=at_least(3), default=7, help="timed runs of each mode")
    return parser.parse_args(arguments)


def parts(text: str) -> tuple[float, ...]:
    """Return the numbers between 0 and 1 that a command line's word lists.

    Raises:
        argparse.ArgumentTypeError: One is none.
    """
    try:
        found = tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        found = (0.0,)
    if not all(0 < target < 1 for target in found):
        raise argparse.ArgumentTypeError(f"must be numbers between 0 and 1, comma-separated, not {text!r}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the records."""
    args = parse(arguments)
    out = output_path(args.out, "offload.jsonl")
    tower.start_process()
    modules = [module for module in args.modules.split(",") if module]
    for name in args.cases:
        slots = args.slots or SLOTS[name]
        if name.startswith("experts"):
            case = packs(name, slots, modules)
        else:
            case = images(name, CASES.get(name) or one_image(int(name.removeprefix("tokens_"))), slots)
        for record in records(case, args.modes, args.targets, args.repeats):
            put_record(out, record)
            print(summary(record), flush=True)
        del case
        collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
