"""The cases of bench_packed.py, each measured in a process of its own."""

import argparse
import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.runs.results import first_line, put_record, read_records
from scripts.performance.packed.bench import Bench
from scripts.performance.packed.limits import TOKENS, Records
from scripts.performance.packed.plans import COSTS, DISTRIBUTIONS, PLAN, Distribution
from scripts.performance.processes import TrainingFailed, TrainingProcess

MODULE = "scripts.performance.packed.cases"
STACK = (
    "megatron.core.extensions.transformer_engine",
    "megatron.core.models.gpt.gpt_model",
    "bridge_cg_plugin.upstream.hooks.helpers.packed_helper",
)
# Cases that measure the planner's predictions begin with this; then comes the model.
PLANS = "plans_"
# Seconds that a process has; one that hangs must not keep the others.
LIMIT_S = 240.0


def run_cases(cases: Sequence[str], words: Sequence[str], seconds: float, out: Path) -> tuple[Records, list[str]]:
    """Run every case in a process of its own; returns the records, and why packs or cases have none.

    Args:
        cases: Models, or models behind `PLANS`.
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
    parser.add_argument("--distributions", default=",".join(DISTRIBUTIONS))
    args = parser.parse_args(words)

    from scripts.performance.measuring.tilings import compiled_side_by_side
    from scripts.performance.models import tower

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
    parts = _plan_parts(args) if args.case.startswith(PLANS) else _model_parts(args)
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
    model = args.case.removeprefix(PLANS)
    bench = Bench(model, args.repeats, args.fused_rope)
    cost = bench.forecast()
    if args.cost_model is not None:
        yield f"{COSTS}{model}", bench.costs
        cost = bench.fit_costs(args.cost_model)
    for name in args.distributions.split(",") if args.plans else ():
        yield f"{PLAN}{model}_{name}", partial(bench.plan, Distribution(name, cost))
        bench.free_memory()
