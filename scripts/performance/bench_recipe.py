"""Optimizer steps of a full-size recipe, eager, with the encoder on graphs, and with the language model on graphs too.

    python scripts/performance/bench_recipe.py --case 8b_sft_tp2 --eager-runs 5 --modes plugin_vision,plugin
    python scripts/performance/bench_recipe.py --recipe qwen3_vl_8b_vision_graphs_h200_peft_config --image 512x512

Weights are random and images are Bridge's mock ones, of one size or, with `--image coco`, of COCO's sizes. The model's
configuration and a processor like its own are written to a temporary folder: nothing is read from a network or a
checkpoint. Each run is a process on every GPU; all import at once and train one after the other. One of the last steps
is profiled, none timed. Other flags and overrides are those of `bridge-cg train`.

Records go to docs/benchmarks/whole_step.jsonl. Exit status: 1 where a run failed or did not begin in time; 2 for
refused input.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.runs.results import output_path, put_cases
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.options.flags import as_typed
from scripts.performance.measuring.machine import gpus_here
from scripts.performance.runs import recipe_bench
from scripts.performance.runs.mock_images import COCO, MockImages, read_images
from scripts.performance.runs.recipe_bench import GRAPHS, PLUGIN, Bench
from scripts.performance.runs.recipe_cases import CASES, LORA, RecipeCase


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return this command's arguments and the others, which go to `bridge-cg train`.

    Raises:
        OptionError: A value cannot work.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--case", choices=CASES, help=f"a recipe with its GPUs and overrides; {LORA} if left out")
    what.add_argument("--recipe", metavar="NAME", help="a recipe or preset, instead of a case")
    parser.add_argument("--gpus", type=int, metavar="N", help="ranks, with a GPU each; the case's, or 1")
    parser.add_argument(
        "--image", type=read_images, default=MockImages(), metavar="WxH", help=f"pixels of every image, or {COCO}"
    )
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of each run; the first 6 do not count")
    parser.add_argument(
        "--global-batch", type=int, metavar="N", help="images, one a sample, of a step; the case's, or 8"
    )
    parser.add_argument("--eager-runs", type=int, default=2, metavar="N", help="eager runs; 2 or more have a spread")
    parser.add_argument("--modes", default=PLUGIN, metavar="LIST", help=f"comma-separated; all: {', '.join(GRAPHS)}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="runs that have not ended then are ended")
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/whole_step.jsonl on a GPU")
    args, rest = parser.parse_known_args(arguments)
    case = _chosen(args)
    rest = [*case.words, *rest]
    if unknown := [mode for mode in args.modes.split(",") if mode not in GRAPHS]:
        raise OptionError("modes", unknown[0], f"any of {', '.join(GRAPHS)}, comma-separated", "Correct the name.")
    recipe_bench.check(args, rest)
    return args, rest


def _chosen(args: argparse.Namespace) -> RecipeCase:
    """Complete the arguments with those of a case; returns it, or one that is made for the recipe."""
    if args.recipe is None:
        args.case = args.case or LORA
    case = RecipeCase(args.recipe) if args.case is None else CASES[args.case]
    args.recipe = case.recipe
    args.gpus = case.gpus if args.gpus is None else args.gpus
    args.global_batch = case.batch if args.global_batch is None else args.global_batch
    return case


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all runs and write their records."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        args, rest = parse(given)
        out = output_path(args.out, "whole_step.jsonl")
        recipe_bench.check_gpus(args.gpus, gpus_here())
    except ValueError as error:
        print(f"bench_recipe.py: {as_typed(error, given)}", file=sys.stderr)
        return 2
    modes = recipe_bench.modes_of(args.eager_runs, args.modes.split(","))
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        if refused := recipe_bench.refusal(args, rest, folder):
            print(refused, file=sys.stderr)
            return 2
        bench = Bench(args, rest, folder, folder / "checkpoint")
        bench.start(modes, stack)
        _write_files(args.recipe, folder)
        runs: dict[str, dict[str, Any] | str] = {}
        for mode in modes:
            runs[mode] = bench.run(mode)
            records = recipe_bench.records_of(recipe_bench.case_of(args), runs, args.steps, args.gpus)
            put_cases(out, records)
    print("\n".join(map(recipe_bench.in_words, records)))
    return 1 if any("error" in record for record in records) else 0


def _write_files(recipe: str, folder: Path) -> None:
    """Write the model's files and what stands for a checkpoint, while the runs' processes import."""
    from scripts.performance.models.local_hub import write_checkpoint, write_hub

    write_hub(folder, [recipe_bench.model_of(recipe)])
    write_checkpoint(folder)


if __name__ == "__main__":
    sys.exit(main())
