"""Whole optimizer steps of Bridge's `pretrain()`: image mixes x language models x eager, upstream's graphs, the plugin.

    python scripts/performance/bench_step.py
    python scripts/performance/bench_step.py --images mixed --language-models 16x2048 --modes eager,plugin --seconds 200

Trains examples/photographs, each run in a process of its own, with 4 microbatches a step. A record is written after
each run and replaces an older one of its case and mode; a run that fails has a record with the error.
"""

import argparse
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from examples.photographs.gpu import SKIPPED, median_ms  # noqa: E402
from examples.photographs.processes import TrainingFailed, TrainingProcess  # noqa: E402
from scripts.performance.results import output_path, provenance, put_record, read_records  # noqa: E402

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
# Processes that import side by side while none trains.
AHEAD = 4
WRONG = "computes another function: no rotary embedding, attention across images"


@dataclass(frozen=True, slots=True)
class Case:
    """One training run.

    Attributes:
        images: Of `IMAGES`.
        language_model: Layers x width.
        mode: Of `MODES`.
    """

    images: str
    language_model: str
    mode: str

    @property
    def name(self) -> str:
        """Name in records."""
        return f"{self.images}_{self.language_model}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/steps.jsonl on a GPU")
    parser.add_argument("--images", default=",".join(IMAGES), help=f"comma-separated; all: {', '.join(IMAGES)}")
    parser.add_argument("--language-models", default=",".join(LANGUAGE_MODELS), help="comma-separated LAYERSxWIDTH")
    parser.add_argument("--modes", default=",".join(MODES), help=f"comma-separated; all: {', '.join(MODES)}")
    parser.add_argument("--steps", type=int, default=16, help=f"optimizer steps; the first {SKIPPED} do not count")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no further run begins after this long")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all runs and write the records."""
    args = parse(arguments)
    try:
        runs = cases(args)
        out = output_path(args.out, "steps.jsonl")
    except ValueError as error:
        print(f"bench_step.py: {error}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder:
        for some in itertools.batched(runs, AHEAD):
            for case, record in measure_some(some, args.steps, deadline, out, Path(folder)):
                put_record(out, record)
                print(
                    f"{case.name} {case.mode}: {record.get('error') or format(record['ms'], '.1f') + ' ms'}", flush=True
                )
    return 0


def measure_some(
    some: Sequence[Case], steps: int, deadline: float, out: Path, folder: Path
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Yield the records of a few runs, whose processes import side by side and train one after another."""
    processes = [] if time.monotonic() > deadline else [TrainingProcess(folder / f"{i}.log") for i in range(len(some))]
    failed: dict[int, TrainingFailed] = {}
    try:
        for index, process in enumerate(processes):
            try:
                process.wait_until_ready()
            except TrainingFailed as error:
                failed[index] = error
        for index, case in enumerate(some):
            if time.monotonic() > deadline:
                yield case, unmeasured(case, "not measured, the time was used up; give more --seconds")
            elif index in failed:
                yield case, unmeasured(case, error_in(str(failed[index])))
            else:
                yield case, measure(processes[index], case, steps, eager_of(case, read_records(out)))
    finally:
        for process in processes:
            process.close()


def cases(args: argparse.Namespace) -> list[Case]:
    """Return the runs that the command line asks for, eager ones of a case first.

    Raises:
        ValueError: A name is unknown, or there are too few steps.
    """
    if args.steps <= SKIPPED:
        raise ValueError(f"--steps {args.steps}: allowed is more than {SKIPPED}, which do not count; take 16")
    chosen = {}
    for option, allowed in (("images", IMAGES), ("modes", MODES)):
        names = [name for name in getattr(args, option).split(",") if name]
        unknown = [name for name in names if name not in allowed]
        if unknown or not names:
            raise ValueError(
                f"--{option} {','.join(unknown)}: allowed is any of {', '.join(allowed)}; correct the name"
            )
        chosen[option] = names
    models = args.language_models.split(",")
    for model in models:
        if not re.fullmatch(r"[1-9]\d*x(2048|2560)", model):
            raise ValueError(
                f"--language-models {model}: allowed is LAYERSxWIDTH, width 2048 or 2560; write 4x2048, say"
            )
    modes = [mode for mode in MODES if mode in chosen["modes"]]
    return [Case(images, model, mode) for model in models for images in chosen["images"] for mode in modes]


def measure(process: TrainingProcess, case: Case, steps: int, eager: dict[str, Any] | None) -> dict[str, Any]:
    """Train one run in its process and return its record."""
    told, further = MODES[case.mode]
    words = ["--steps", str(steps), "--language-model", case.language_model, *IMAGES[case.images], *further]
    try:
        run = process.train(told, words)
    except TrainingFailed as error:
        return unmeasured(case, error_in(str(error)))
    ms = median_ms(run)
    record = {
        **description(case),
        "ms": ms,
        "losses": run["losses"],
        "grad_norms": run["grad_norms"],
        "peak_gb": run["peak_gb"],
        "graphs": run["graphs"],
        **provenance(steps - SKIPPED, 1234),
    }
    if case.mode != "upstream":  # its vision layers look alike
        record["language_model_layers"] = run["language_model_layers"]
    if case.mode == "eager":
        record["ratio"] = 1.0
    elif eager is not None and len(eager["losses"]) == len(run["losses"]):
        record["ratio"] = ms / eager["ms"]
        record["loss_rel"] = max(abs(a - b) / abs(b) for a, b in zip(run["losses"], eager["losses"], strict=True))
    return record


def description(case: Case) -> dict[str, Any]:
    """Return the fields that say what ran."""
    fields = {"case": case.name, "mode": case.mode, "language_model": case.language_model}
    wrong = {"wrong": WRONG} if case.mode == "upstream" else {}
    return {**fields, "overlap": "--no-overlap" not in MODES[case.mode][1], **wrong}


def unmeasured(case: Case, error: str) -> dict[str, Any]:
    """Return the record of a run that was not measured."""
    return {**description(case), "error": error, **provenance(0, 1234)}


def eager_of(case: Case, records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the eager record of a case that was measured at the same commit, if there is one."""
    commit = provenance(0, 0)["versions"]["commit"]
    found = (r for r in records if (r["case"], r["mode"]) == (case.name, "eager") and "error" not in r)
    return next((r for r in found if r["versions"]["commit"] == commit), None)


def error_in(text: str) -> str:
    """Return the error that a process's output ends with: the last line that begins with an exception's name."""
    lines = [line.strip() for line in text.splitlines()]
    named = [line for line in lines if re.match(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b", line)]
    line = re.sub(r"^\[rank\d+\]: ?", "", named[-1] if named else lines[0])
    return (f"out of memory: {line}" if "out of memory" in line.lower() else line)[:300]


if __name__ == "__main__":
    sys.exit(main())
