"""Parity of encoders' replays with eager: 20 mixes of each encoder from the same captures, beside fp32.

    python scripts/performance/parity_encoders.py
    python scripts/performance/parity_encoders.py --encoders nemotron_vl --layers 4

A mix passes where outputs and gradients differ from eager's by no more than their limit, or where both are as near to
fp32 as eager's. Records go to docs/benchmarks/encoders_parity.jsonl.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import provenance
from bridge_cg_plugin.graphs.errors import CaptureError
from scripts.performance.encoders import MODES, Results, capture, differences, run_step
from scripts.performance.records import at_least, names_of, output_path, put_record
from tests.models import tower
from tests.models.encoder_case import Batch, Encoder
from tests.models.encoders import ENCODERS
from tests.models.mixes import MOST_IMAGES

MIXES, MOST_TOKENS = 20, 8192
EXACT_SHARE = 32  # of 8192 tokens it is the default of `exact_below`
FORWARD_LIMIT = 2e-3
# Gradients may differ from eager's by so much more than eager's from its own, and replays be so much farther from fp32.
NOISE_FACTOR, ALLOWANCE = 1.5, 1.05
NOISE_FLOOR = 2e-3  # where eager repeats itself, padding may round otherwise in bf16 by so much

Record = dict[str, Any]


class Comparison:
    """One encoder, eager, on graphs and in fp32.

    Args:
        name: In records.
        encoder: The encoder.
        layers: How many it has.
        most: Tokens of the largest bucket.
        mode: Of `MODES`.
    """

    def __init__(self, name: str, encoder: Encoder, layers: int, most: int, mode: str = "plugin") -> None:
        self._name, self._encoder, self._layers, self._most, self._mode = name, encoder, layers, most, mode
        self._model: nn.Module = encoder.build(layers)
        self._reference = encoder.reference(encoder, self._model)
        self._grads = tower.MainGrads(self._model)
        self._helper = capture(
            self._model,
            buckets=encoder.mixes.capacities(self._model, most),
            max_frames=MOST_IMAGES,
            exact_below=most // EXACT_SHARE,
            **MODES[mode],
        )
        assert self._helper.graphs is not None
        self._graphs = self._helper.graphs

    def records(self, number: int) -> Iterator[Record]:
        """Replay a mix; yields what was found of eager and of the replay."""
        batch = self._draw(number)
        exact = self._said(self._reference.step(batch))
        before = self._counted()
        replayed = self._run(batch)
        after = self._counted()
        with self._graphs.paused():
            first, second = self._run(batch), self._run(batch)
        common = {
            "case": f"{self._name}_{number}_{self._layers}layers",
            "tokens": batch.tokens,
            "images": batch.images,
            **provenance(1, number),
        }
        noise, found = differences(second, first), differences(replayed, first)
        yield {**common, "mode": "eager", **_errors(first, exact)}
        yield {
            **common,
            "mode": self._mode,
            "bucket": next((bucket for bucket in after[0] if after[0][bucket] != before[0].get(bucket, 0)), None),
            "fallback": next((reason for reason in after[1] if after[1][reason] != before[1].get(reason, 0)), None),
            "forward_rel": found[0],
            "forward_noise": noise[0],
            "bit_equal": found[0] == 0.0,
            "grad_rel": found[1],
            "grad_noise": noise[1],
            **_errors(replayed, exact),
        }

    def close(self) -> None:
        """Give the memory of graphs back."""
        self._helper.delete_cuda_graphs()

    def _draw(self, number: int) -> Batch:
        size = self._encoder.mixes.draw(self._model, random.Random(number), self._most)
        return self._encoder.make_batch(self._model, size, number)

    def _run(self, batch: Batch) -> Results:
        return run_step(self._encoder, self._model, self._grads, batch)

    def _said(self, results: Results) -> Results:
        outputs, gradients = results
        return outputs, [g for g, said in zip(gradients, self._encoder.compared(self._model), strict=True) if said]

    def _counted(self) -> tuple[dict[str, int], dict[str, int]]:
        found = self._graphs.statistics()
        replays = {str(bucket): counts.replays for bucket, counts in found.buckets.items()}
        return replays, {str(reason): count for reason, count in found.fallbacks.items()}


def measure(name: str, encoder: Encoder, layers: int, mixes: int, most: int, mode: str = "plugin") -> Iterator[Record]:
    """Yield the records of so many mixes of one encoder, from the same captures; other arguments as of `Comparison`."""
    comparison = Comparison(name, encoder, layers, most, mode)
    try:
        for number in range(mixes):
            yield from comparison.records(number)
    finally:
        comparison.close()


def _errors(found: Results, exact: Results) -> Record:
    """Return how far outputs and gradients are from fp32."""
    errors = [tower.relative(gradient, wanted) for gradient, wanted in zip(found[1], exact[1], strict=True)]
    return {
        "fp32_output": tower.largest_relative(found[0], exact[0]),
        "fp32_mean": statistics.fmean(errors),
        "fp32_worst": max(errors),
    }


def failures(records: Sequence[Record]) -> list[str]:
    """Return what misses its limit.

    Outputs and gradients must be eager's, or as near to fp32 as these where other kernels round otherwise.
    """
    missed = []
    eager = {r["case"]: r for r in records if r["mode"] == "eager"}
    replays = [r for r in records if r["mode"] != "eager"]
    noise = max((r["grad_noise"] for r in replays), default=0.0)
    for r in replays:
        beside, limit = eager[r["case"]], max(NOISE_FACTOR * noise, NOISE_FLOOR)
        if r["fallback"] is not None or r["bucket"] is None:
            missed.append(f"{r['case']}: not replayed ({r['fallback']})")
        if not (r["forward_rel"] <= FORWARD_LIMIT or r["fp32_output"] <= ALLOWANCE * beside["fp32_output"]):
            missed.append(f"{r['case']}: forward {r['forward_rel']:.2e}, from fp32 {r['fp32_output']:.2e}")
        if not (r["grad_rel"] <= limit or r["fp32_mean"] <= ALLOWANCE * beside["fp32_mean"]):
            missed.append(f"{r['case']}: gradient {r['grad_rel']:.2e} > {limit:.2e}, from fp32 {r['fp32_mean']:.2e}")
    return missed


def print_record(r: Record) -> None:
    """Print one record as a line."""
    line = f"{r['case']:32} {r['mode']:20} {r['tokens']:>5} tokens; from fp32: output {r['fp32_output']:.2e}, "
    line += f"gradients {r['fp32_mean']:.2e}, worst {r['fp32_worst']:.2e}"
    if "forward_rel" in r:
        line += f"; from eager: {r['forward_rel']:.1e}, {r['grad_rel']:.1e} (two eager runs {r['grad_noise']:.1e}); "
        line += str(r["fallback"] or r["bucket"])
    print(line, flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--encoders", type=names_of(*ENCODERS), default=tuple(ENCODERS), help="all if left out")
    parser.add_argument("--layers", type=at_least(2), help="of every encoder; the full size if left out")
    parser.add_argument("--mixes", type=at_least(1), default=MIXES, help="of every encoder")
    parser.add_argument("--tokens", type=at_least(64), default=MOST_TOKENS, help="of the largest bucket")
    parser.add_argument("--mode", default="plugin", choices=tuple(MODES), help="exact kernels if left out")
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/encoders_parity.jsonl on a GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the records; status 1 if something misses its limit."""
    args = parse(arguments)
    out = output_path(args.out, "encoders_parity.jsonl")
    tower.start_process()
    missed, count = [], 0
    for name in args.encoders:
        encoder, records = ENCODERS[name], []
        try:
            for record in measure(name, encoder, args.layers or encoder.layers, args.mixes, args.tokens, args.mode):
                put_record(out, record)
                print_record(record)
                records.append(record)
        except CaptureError as error:
            missed.append(f"{name}: {error}")
        missed += failures(records)
        count += len(records)
    print("\n".join(missed) or f"all {count} records inside their limits")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
