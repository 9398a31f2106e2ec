"""Rounds of reinforcement learning by verl's Megatron engines, eager and on graphs, each run on one GPU.

    PYTHONPATH=FOLDER_OF_VERL python scripts/performance/bench_loops.py --cases verl --rounds 10

The engines are unmodified, without ray and without generation. A policy and a reference compute log-probabilities, the
policy is updated, and the weights of both leave the device and come back. It needs verl 0.9.1 with tensordict, pyvers,
orjson, codetiming and torchdata; ray may be missing.
verl_lora: the same with adapters; the reference is the policy without them.

Models are Qwen3-VL's full vision tower with a language model of 4 layers of 2048, with random weights; nothing is read
from a network. Runs have processes of their own, one after the other. Each round computes log-probabilities again
without graphs and compares them to the bit. Records go to docs/benchmarks/loops.jsonl as soon as a run has ended.

Exit status: 1 where a run failed; 2 for refused input.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.recipe import error_in
from bridge_cg_plugin.cli.runs.results import provenance
from bridge_cg_plugin.upstream.environment import RELEASE_MEMORY
from examples.photographs.processes import TrainingFailed, TrainingProcess
from scripts.performance.loops.records import in_words, record_of
from scripts.performance.loops.rounds import FIRST
from scripts.performance.loops.verl_setup import ADAPTERS
from scripts.performance.records import at_least, names_of, output_path, put_record

WORKER = "scripts.performance.loops.verl_rounds"
SEED = 0
EAGER = "eager"
# The optimizer's first steps amplify rounding, so few eager runs span too little.
MODES = ("eager1", "plugin_packed", "plugin", "eager2", "eager_padded", "eager3", "eager4", "eager5")
# Runs whose log-probabilities are another eager run's than the first's: packs are padded in both.
SAME_ROWS = {"plugin_packed": "eager_padded"}

Run = dict[str, Any] | str  # what a run's process wrote, or its error


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", type=names_of(*ADAPTERS), default=tuple(ADAPTERS), help=f"of {', '.join(ADAPTERS)}")
    parser.add_argument("--modes", type=names_of(*MODES), default=MODES, help=f"of {', '.join(MODES)}")
    parser.add_argument("--rounds", type=at_least(FIRST + 1), default=20, help=f"of each run; {FIRST} are not timed")
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/loops.jsonl on a GPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make all runs and write their records."""
    args = parse(arguments)
    out = output_path(args.out, "loops.jsonl")
    if importlib.util.find_spec("verl") is None:
        print("bench_loops.py: verl is not installed. Add its folder to PYTHONPATH.", file=sys.stderr)
        return 2
    failed = False
    for case in args.cases:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            modes = [mode for mode in MODES if mode in args.modes]
            processes = {mode: started(mode, Path(folder), stack) for mode in modes}
            model, runs = files(Path(folder)), dict[str, Run]()
            for mode, process in processes.items():
                runs[mode] = trained(process, mode, ["--case", case, "--model", str(model)], args.rounds)
                for record in records(case, runs):
                    put_record(out, record)
                print(in_words(record), flush=True)
                failed = failed or "error" in record
    return 1 if failed else 0


def started(mode: str, folder: Path, stack: ExitStack) -> TrainingProcess:
    """Let a run's process import; it is closed with the stack."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment |= {} if mode.startswith(EAGER) else {RELEASE_MEMORY: "1"}
    process = TrainingProcess(folder / f"{mode}.log", module=WORKER, environment=environment)
    stack.callback(process.close)
    return process


def files(folder: Path) -> Path:
    """Write the model's files while the runs' processes import; returns their folder."""
    from scripts.performance.loops.files import configuration, write_files

    return write_files(folder, configuration(), SEED)


def trained(process: TrainingProcess, mode: str, words: Sequence[str], rounds: int) -> Run:
    """Let a process build and make its rounds; returns what it wrote, or why it did not."""
    try:
        process.wait_until_ready()
        return process.train(mode, [*words, "--rounds", str(rounds), "--seed", str(SEED)])
    except TrainingFailed as error:
        print(f"{mode}: {error}", file=sys.stderr, flush=True)
        return error_in(str(error))


def records(case: str, runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """Return the records of the runs that have ended, the last one's last."""
    eager = [run for mode, run in runs.items() if mode.startswith(EAGER) and isinstance(run, dict)]
    found = []
    for mode, run in runs.items():
        own = {"case": case, "mode": mode}
        if isinstance(run, str):
            found.append({**own, **provenance(0, SEED), "error": run})
            continue
        beside = [] if mode == "eager1" or not isinstance(runs.get("eager1"), dict) else eager
        if mode.startswith(EAGER):  # it is part of the spread
            beside = beside[:1]
        twin = runs.get(SAME_ROWS.get(mode, "eager1"))
        figures = record_of(run, beside, twin if isinstance(twin, dict) else None)
        found.append({**own, **provenance(len(run["rounds"]), SEED), **figures})
    return found


if __name__ == "__main__":
    sys.exit(main())
