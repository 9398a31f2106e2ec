"""Steps of Bridge's full-size recipes, eager and on graphs, from random weights, on one GPU or several.

    python scripts/performance/bench_recipe.py
    python scripts/performance/bench_recipe.py --case 8b_sft_tp2 --eager-runs 5
    python scripts/performance/bench_recipe.py --recipe qwen3_vl_8b_sft_config --gpus 4 train.micro_batch_size=1

A case names a recipe, its GPUs and overrides; further flags and overrides are those of `bridge-cg train`, graph options
among them for graphs only. Configuration and tokenizer are written here, images are mock data of 1024 x 768 pixels;
nothing is read from a network. Each run has processes of its own, a GPU each. Records go to
docs/benchmarks/whole_step.jsonl after each run, in place of all of the case.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.cli.report.runs import GIB, KINDS, WARM_UP, compare_to_spread
from bridge_cg_plugin.cli.runs import first_look
from bridge_cg_plugin.cli.runs.compare import eager_words
from bridge_cg_plugin.cli.runs.recipe import error_in, read
from bridge_cg_plugin.cli.runs.results import provenance
from bridge_cg_plugin.options import OptionError
from examples.photographs.processes import TrainingFailed, TrainingProcess
from scripts.performance.records import at_least, loss_distance, names_of, output_path, put_cases
from tests.models.hub_folders import MODELS, variables_of


@dataclass(frozen=True, slots=True)
class Case:
    """One case of docs/benchmarks/whole_step.jsonl.

    Attributes:
        recipe: A recipe's or preset's name.
        gpus: Ranks, with a GPU each.
        words: Flags and overrides of `bridge-cg train`.
        batch: Samples of a step over all ranks.
    """

    recipe: str
    gpus: int = 1
    words: tuple[str, ...] = ()
    batch: int = 8


LORA = "8b_lora"
_EXPERTS = "qwen3_vl_30b_a3b_vision_graphs_h200_sft_config"
_PEFT, _SFT = (f"qwen3_vl_8b_vision_graphs_h200_{task}_config" for task in ("peft", "sft"))
_TP1, _TP2 = (f"model.tensor_model_parallel_size={size}" for size in (1, 2))
_PACKED = (_TP1, "dataset.enable_in_batch_packing=true", "train.micro_batch_size=2")
_PADDED = (_TP1, "model.num_layers=8", "model.linear_attention_freq=4", "train.micro_batch_size=1")
_ONE = (_TP1, "model.num_layers=6", "model.expert_model_parallel_size=1", "model.cuda_graph_modules=[attn,moe_router]")
_FULL = tuple(f"model.recompute_{field}" for field in ("granularity=full", "method=uniform", "num_layers=1"))
_FROZEN = (*_FULL, "model.freeze_vision_model=true", "model.freeze_vision_projection=true")
_LONG = ("model.seq_length=8192", "dataset.seq_length=8192", f"dataset.prompt={'a' * 2800}")  # a token a character
# Random weights send three times the mean of tokens to one of eight GPUs, and samples are padded to the whole length:
# with 4096 tokens, 48 layers do not fit 140 GB.
_FITTING = ("model.moe_router_force_load_balancing=true", "model.seq_length=2048", "dataset.seq_length=2048")
CASES = {
    "8b_sft_tp2": Case(_SFT, 2, (_TP2,)),
    "8b_sft_tp2_dp2": Case(_SFT, 4, (_TP2,), 16),
    "8b_sft_dp4": Case(_SFT, 4, (_TP1,), 16),
    "8b_sft_dp4_overlap": Case(_SFT, 4, (_TP1, "ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true"), 16),
    LORA: Case(_PEFT),
    "8b_lora_8192_recompute": Case(_PEFT, words=(*_FULL, *_LONG)),
    "8b_lora_dp2": Case(_PEFT, 2, (), 16),
    "8b_lora_dp4": Case(_PEFT, 4, (), 32),
    "qwen35_9b_lora_packed": Case("qwen35_vl_9b_peft_config", words=_PACKED),
    "qwen35_9b_8_layers_padded": Case("qwen35_vl_9b_vision_graphs_h200_sft_config", words=_PADDED),
    "30b_a3b_8_layers_ep2": Case(_EXPERTS, 2, ("model.num_layers=8", "model.expert_model_parallel_size=2")),
    "30b_a3b_6_layers_recompute": Case(_EXPERTS, words=(*_ONE, *_FROZEN)),
    "qwen25_7b_12_layers_recompute": Case("qwen25_vl_7b_sft_config", words=(_TP1, "model.num_layers=12", *_FROZEN)),
    "gemma3_4b": Case("gemma3_vl_4b_sft_config", words=(_TP1,)),
    # A GPU holds as many parameters of experts as one of eight does of all 48 layers.
    "30b_a3b_24_layers_ep4": Case(
        _EXPERTS, 4, ("model.num_layers=24", "model.expert_model_parallel_size=4", *_FITTING), 16
    ),
    "30b_a3b_ep8": Case(_EXPERTS, 8, ("model.expert_model_parallel_size=8", *_FITTING), 32),
}

WORKER = "scripts.performance.random_weights"
# What each mode of graphs adds to the command line.
GRAPHS = {
    "plugin": ("--cuda_graphs=exact",),
    "plugin_vision": ("--cuda_graphs=exact", "--cuda_graph_impl", "none"),
    "plugin_fastest": ("--cuda_graphs=fastest",),
    "plugin_kept": ("--cuda_graphs=exact", "model.recompute_granularity=null", "model.recompute_method=null"),
}
SEED = 1234
# Nothing is evaluated; all runs draw the same weights. Fused accumulation is Apex's, which the registry has not.
WORDS = (
    "train.eval_iters=0",
    "validation.eval_iters=0",
    "model.gradient_accumulation_fusion=false",
    f"rng.seed={SEED}",
    "rng.te_rng_tracker=true",
    "model.use_te_rng_tracker=true",
    "dataset.num_base_examples=16",
    "dataset.image_size=[1024,768]",
)

Run = dict[str, Any] | str  # a run's record, or its error


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
    parser.add_argument("--gpus", type=at_least(1), help="ranks, with a GPU each; the case's, or 1")
    steps = f"optimizer steps of each run; the first {WARM_UP} do not count"
    parser.add_argument("--steps", type=at_least(WARM_UP + 1), default=16, help=steps)
    parser.add_argument("--global-batch", type=at_least(1), help="images, one a sample, of a step; the case's, or 8")
    parser.add_argument("--eager-runs", type=at_least(1), default=2, help="eager runs; 2 or more have a spread")
    parser.add_argument("--modes", type=names_of(*GRAPHS), default=("plugin",), help=f"of {', '.join(GRAPHS)}")
    parser.add_argument("--out", type=Path, help="records; docs/benchmarks/whole_step.jsonl on a GPU")
    args, rest = parser.parse_known_args(arguments)
    args.case = args.case or (None if args.recipe else LORA)
    case = Case(args.recipe) if args.recipe else CASES[args.case]
    args.recipe, rest = case.recipe, [*case.words, *rest]
    args.gpus, args.global_batch = args.gpus or case.gpus, args.global_batch or case.batch
    model_of(args.recipe)
    for mode in args.modes:
        read(words(args, rest, mode, Path("checkpoint")))
    return args, rest


def model_of(recipe: str) -> str:
    """Return the name on the hub of a recipe's model.

    Raises:
        OptionError: Its configuration cannot be made here.
    """
    for part, name in MODELS.items():
        if recipe.startswith(f"{part}_"):
            return name
    known = " or ".join(MODELS)
    raise OptionError(
        "recipe", recipe, f"a recipe or preset of {known}", "Other models need their hub: bridge-cg compare."
    )


def words(args: argparse.Namespace, rest: Sequence[str], mode: str, checkpoint: Path) -> list[str]:
    """Return the command line of `bridge-cg train` for one run.

    Args:
        args: Of `parse`.
        rest: Further flags and overrides; graph options among them are for graphs only.
        mode: Of `GRAPHS`, or eager's.
        checkpoint: What stands for a checkpoint, where there are adapters.
    """
    adapters = [f"checkpoint.pretrained_checkpoint={checkpoint}"] if "_peft_" in args.recipe else []
    given = [*rest, *GRAPHS[mode]] if mode in GRAPHS else eager_words(rest)
    sizes = (f"train.train_iters={args.steps}", f"train.global_batch_size={args.global_batch}")
    return ["--recipe", args.recipe, "--mode", "pretrain", "--mock_data", *given, *adapters, *WORDS, *sizes]


def refusal(args: argparse.Namespace, rest: Sequence[str], folder: Path) -> str:
    """Return what a run with graphs would be refused with, in about two seconds; empty where it would not.

    Args:
        args: Of `parse`.
        rest: Further flags and overrides.
        folder: One that exists, in the place of the checkpoint.
    """
    start = ["--launcher", "torchrun", "--gpus_per_node", str(args.gpus)]
    return first_look.refusal([*start, *words(args, rest, "plugin", folder)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all runs and write their records; status 1 where one failed, 2 for refused input."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        args, rest = parse(given)
        out = output_path(args.out, "whole_step.jsonl")
    except ValueError as error:
        print(f"bench_recipe.py: {error}", file=sys.stderr)
        return 2
    first, *others = (f"eager{number + 1}" for number in range(args.eager_runs))
    case = args.case or args.recipe.removesuffix("_config")
    runs: dict[str, Run] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if refused := refusal(args, rest, folder):
            print(refused, file=sys.stderr)
            return 2
        write_files(args.recipe, folder)
        with ExitStack() as stack:
            modes = (first, *args.modes, *others)
            processes = {mode: started(args.gpus, folder, mode, stack) for mode in modes}
            for mode, process in processes.items():
                runs[mode] = trained(process, mode, words(args, rest, mode, folder / "checkpoint"))
                records = records_of(case, runs, args.steps, args.gpus)
                put_cases(out, records)
    print("\n".join(map(in_words, records)))
    return 1 if any("error" in record for record in records) else 0


def write_files(recipe: str, folder: Path) -> None:
    """Write the model's files and what stands for a checkpoint."""
    from tests.models.local_hub import write_checkpoint, write_hub

    write_hub(folder, [model_of(recipe)])
    write_checkpoint(folder)


def started(gpus: int, folder: Path, mode: str, stack: ExitStack) -> TrainingProcess:
    """Let the processes of a run import; they are closed with the stack."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **variables_of(folder)}
    process = TrainingProcess(folder / f"{mode}.log", ranks=gpus, module=WORKER, environment=environment)
    stack.callback(process.close)
    return process


def trained(process: TrainingProcess, mode: str, line: Sequence[str]) -> Run:
    """Train once; returns what the run did, or why it did not."""
    try:
        process.wait_until_ready()
        return process.train(mode, line)
    except TrainingFailed as error:
        print(error, file=sys.stderr, flush=True)
        return error_in(str(error))


def records_of(case: str, runs: Mapping[str, Run], steps: int, gpus: int) -> list[dict[str, Any]]:
    """Return the records of all runs, beside the first eager one.

    Args:
        case: The case.
        runs: By mode.
        steps: Of each run.
        gpus: Of each run.
    """
    origin = {"gpus": gpus, **provenance(steps - WARM_UP, SEED)}
    measured = {mode: run for mode, run in runs.items() if isinstance(run, dict)}
    eager = [run for mode, run in measured.items() if mode not in GRAPHS]
    found = []
    for mode, run in runs.items():
        own: dict[str, Any] = {"case": case, "mode": mode, **origin}
        if isinstance(run, str):
            found.append({**own, "repeats": 0, "error": run})
            continue
        own |= {**run, **graphs_of(run)}
        if beside := measured.get("eager1"):
            own["ratio"] = run["ms"] / beside["ms"]
            own["loss_rel"] = loss_distance(run["losses"], beside["losses"])
        if mode in GRAPHS and len(eager) > 1:
            own["inside_spread"] = is_inside(eager, run)
        found.append(own)
    return found


def graphs_of(run: Mapping[str, Any]) -> dict[str, float]:
    """Return what all graphs of a run take: GiB of memory and seconds of capture."""
    kinds = [statistics for kind in KINDS if (statistics := run.get(kind.field)) is not None]
    if not kinds:
        return {}
    memory = sum(each["memory_bytes"] for each in kinds)
    return {"memory_gb": memory / GIB, "capture_s": float(sum(each["capture_seconds"] for each in kinds))}


def is_inside(eager: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> bool:
    """Return whether a run's losses and gradient norms stay inside the spread of eager runs."""
    names = ("losses", "grad_norms")
    return all(compare_to_spread([each[name] for each in eager], run[name]).inside for name in names)


def in_words(record: Mapping[str, Any]) -> str:
    """Return one line of a record for a person."""
    if "error" in record:
        return f"{record['mode']}: {record['error']}"
    said = [f"{record['mode']}: {record['ms']:.1f} ms a step", f"peak {record['peak_gb']:.1f} GiB"]
    said += [f"ratio {record['ratio']:.3f}, losses within {record['loss_rel']:.1e}"] if "ratio" in record else []
    if "memory_gb" in record:
        said.append(f"graphs {record['memory_gb']:.1f} GiB, captured in {record['capture_s']:.1f} s")
    if "inside_spread" in record:
        said.append("inside eager's spread" if record["inside_spread"] else "OUTSIDE eager's spread")
    return "; ".join(said)


if __name__ == "__main__":
    sys.exit(main())
