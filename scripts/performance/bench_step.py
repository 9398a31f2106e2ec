"""Whole optimizer steps of Bridge's `pretrain()`: image mixes x language models x eager, upstream's graphs, the plugin.

    python scripts/performance/bench_step.py
    python scripts/performance/bench_step.py --images mixed --language-models 16x2048 --modes eager,plugin

Trains examples/photographs with 4 microbatches a step, one run after the other, each in a process of its own; the next
one imports meanwhile. A record is written after each run and replaces an older one of its case and mode; a run that
fails has a record with the error.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.recipe import error_in
from bridge_cg_plugin.cli.runs.results import provenance
from examples.photographs.comparison import SKIPPED, median_ms
from examples.photographs.processes import TrainingFailed, TrainingProcess
from scripts.performance.records import loss_distance, names_of, output_path, put_record

IMAGES = {"single": ("--single",), "mixed": (), "large": ("--large",)}
LANGUAGE_MODELS = ("4x2048", "16x2048", "28x2560")
# Mode -> (what examples.photographs --train is told, its further words).
MODES = {
    "eager": ("eager", ()),
    # Its capture aborts under overlap_param_gather, which the other modes have.
    "upstream": ("upstream", ("--no-overlap",)),
    "plugin": ("graphs", ()),
    "plugin_language_model": ("graphs", ("model.cuda_graph_impl=transformer_engine", "model.cuda_graph_modules=[]")),
    "plugin_full_iteration": ("graphs", ("model.cuda_graph_impl=full_iteration",)),
}
# What upstream's vision graphs compute instead of the tower.
WRONG = "computes another function: no rotary embedding, attention across images"
# Samples, those of 4 steps: all are met before steps are timed, so that eager's attention is planned by then.
DISTINCT = 16

Case = tuple[str, str, str]  # of IMAGES, LAYERSxWIDTH, of MODES


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/steps.jsonl on a GPU")
    parser.add_argument("--images", type=names_of(*IMAGES), default=tuple(IMAGES), help=f"of {', '.join(IMAGES)}")
    parser.add_argument("--language-models", default=",".join(LANGUAGE_MODELS), help="comma-separated LAYERSxWIDTH")
    parser.add_argument("--modes", type=names_of(*MODES), default=tuple(MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--steps", type=int, default=14, help=f"optimizer steps; the first {SKIPPED} do not count")
    args = parser.parse_args(arguments)
    if args.steps <= SKIPPED:
        parser.error(f"Cannot use --steps {args.steps}: the first {SKIPPED} do not count. Take 14.")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all runs and write the records; status 1 where a run of eager or the plugin failed."""
    args = parse(arguments)
    out = output_path(args.out, "steps.jsonl")
    models = args.language_models.split(",")
    cases = [(images, model, mode) for model in models for images in args.images for mode in args.modes]
    eager: dict[str, dict[str, Any]] = {}
    failed = False
    for case, run in trained(cases, args.steps):
        record = record_of(case, run, args.steps, eager)
        put_record(out, record)
        failed = failed or ("error" in record and case[2] != "upstream")
        print(f"{record['case']} {case[2]}: {record.get('error') or format(record['ms'], '.1f') + ' ms'}", flush=True)
    return 1 if failed else 0


def trained(cases: Sequence[Case], steps: int) -> Iterator[tuple[Case, dict[str, Any] | str]]:
    """Yield what each run did, or why it did not train."""
    with ExitStack() as stack:
        following = stack.enter_context(TrainingProcess.started())
        for number, case in enumerate(cases):
            process = following
            if number + 1 < len(cases):
                following = stack.enter_context(TrainingProcess.started())
            told, further = MODES[case[2]]
            words = ["--steps", str(steps), "--language-model", case[1], *IMAGES[case[0]], *further]
            try:
                process.wait_until_ready()
                yield case, process.train(told, [*words, "--distinct", str(DISTINCT), "--loader-workers", "0"])
            except TrainingFailed as error:
                yield case, error_in(str(error))


def record_of(case: Case, run: dict[str, Any] | str, steps: int, eager: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the record of what a run did, or of why it did not; keeps eager's by case for those that follow.

    Args:
        case: What ran.
        run: Its figures, or its error.
        steps: Optimizer steps.
        eager: The eager records so far.
    """
    images, model, mode = case
    record: dict[str, Any] = {"case": f"{images}_{model}", "mode": mode, "language_model": model}
    record |= {"wrong": WRONG} if mode == "upstream" else {}
    record["overlap"] = "--no-overlap" not in MODES[mode][1]
    if isinstance(run, str):
        return {**record, "error": run, **provenance(0, 1234)}
    record |= {name: run[name] for name in ("losses", "grad_norms", "peak_gb", "graphs")}
    record |= {"ms": median_ms(run), "distinct_samples": DISTINCT, **provenance(steps - SKIPPED, 1234)}
    if mode != "upstream":  # its vision layers look alike
        record["language_model_layers"] = run["language_model_layers"]
    if mode == "eager":
        eager[record["case"]] = {**record, "ratio": 1.0}
    if beside := eager.get(record["case"]):
        record["ratio"] = record["ms"] / beside["ms"]
        record["loss_rel"] = loss_distance(record["losses"], beside["losses"])
    return record


if __name__ == "__main__":
    sys.exit(main())
