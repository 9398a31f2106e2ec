"""Rounds of reinforcement learning, each run on one GPU, by loops other than Bridge's own, eager and on graphs.

    PYTHONPATH=FOLDER_OF_VERL python scripts/performance/bench_loops.py
    python scripts/performance/bench_loops.py --cases plain --rounds 8

verl: verl's Megatron engines, unmodified, without ray and without generation. A policy and a reference compute
log-probabilities, the policy is updated, and the weights of both leave the device and come back. It needs verl 0.9.1
with tensordict, pyvers, orjson, codetiming and torchdata; ray may be missing.
verl_lora: the same with adapters; the reference is the policy without them.
verl_deterministic: as verl, with deterministic kernels and images that these take, so that training is compared to the
bit; needs an H200.
plain: a loop over megatron-core's schedule, three passes over the images of a frozen vision tower.

Models are Qwen3-VL's full vision tower with a language model of 4 layers of 2048, with random weights; nothing is read
from a network. Each run is a process of its own, which has a GPU for itself; with several GPUs runs go side by side.
Each round computes log-probabilities again without graphs and compares them to the bit. A run that is late makes fewer
rounds. Records go to docs/benchmarks/loops.jsonl as soon as a run has ended.

Exit status: 1 where a run failed; 2 for refused input.
"""

import argparse
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import output_path, put_record
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.options.flags import as_typed
from scripts.performance.loops.bench import CASES, SEED, Bench, Case
from scripts.performance.loops.records import in_words
from scripts.performance.loops.rounds import FIRST
from scripts.performance.measuring.machine import gpus_here

SHARED_MEMORY = Path("/dev/shm")
FILES_BYTES = 4 << 30  # of a model


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's arguments.

    Raises:
        OptionError: A value cannot work.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", default=",".join(CASES), metavar="LIST", help="comma-separated; default: all")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help=f"of each run; {FIRST} are not timed")
    parser.add_argument("--seconds", type=float, default=400.0, help="for each case, all its runs and their set-up")
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/loops.jsonl on a GPU")
    args = parser.parse_args(arguments)
    args.cases = [name for name in args.cases.split(",") if name]
    if unknown := [name for name in args.cases if name not in CASES]:
        raise OptionError("cases", unknown[0], f"any of {', '.join(CASES)}, comma-separated", "Correct the name.")
    if args.rounds <= FIRST:
        raise OptionError("rounds", args.rounds, f"a whole number above {FIRST}", "Raise it.")
    if any(CASES[name].needs_files for name in args.cases) and importlib.util.find_spec("verl") is None:
        raise OptionError.because(
            "cases", "Cannot run verl's cases: verl is not installed. Add its folder to PYTHONPATH, or --cases plain."
        )
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Make all runs and write their records."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        args = parse(given)
        out = output_path(args.out, "loops.jsonl")
    except ValueError as error:
        print(f"bench_loops.py: {as_typed(error, given)}", file=sys.stderr)
        return 2
    found = [record for name in args.cases for record in measure(CASES[name], args, out)]
    return 1 if any("error" in record for record in found) else 0


def measure(case: Case, args: argparse.Namespace, out: Path) -> list[dict[str, Any]]:
    """Make the runs of one case; returns their records, which are written."""

    def keep(records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            put_record(out, record)
        print(in_words(records[-1]), flush=True)

    with tempfile.TemporaryDirectory(dir=_fast_folder()) as name:
        bench = Bench(case, Path(name), args.rounds, args.seconds, max(gpus_here(), 1))
        with bench.started():
            return bench.run(_files(Path(name)) if case.needs_files else None, keep)


def _files(folder: Path) -> Path:
    """Write the model's files while the runs' processes import; returns their folder."""
    from scripts.performance.loops.files import configuration, write_files

    return write_files(folder, configuration(), SEED)


def _fast_folder() -> Path | None:
    """Return a folder in memory, where there is one with room for a model; None for the system's."""
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > FILES_BYTES:
        return SHARED_MEMORY
    return None


if __name__ == "__main__":
    sys.exit(main())
