"""Train any recipe of Bridge or preset of the plugin, with graph flags and then `section.name=value` overrides.

    bridge-cg train --recipe qwen3_vl_8b_vision_graphs_h200_pretrain_mock_config --dry-run
    torchrun --nproc_per_node=4 -m bridge_cg_plugin.cli.runs.train --recipe qwen3_vl_8b_pretrain_mock_config \
        --vision_cuda_graph_impl transformer_engine --max_vision_cuda_graph_seq_length 16384 train.train_iters=50

In a checkout `python scripts/performance/run_recipe.py` is the same command.

Flags are applied first, overrides after them in the order of the command line: later ones win. `--dry-run` prints what
all of it resolves to. Exit status 2 means refused input; the reason is on standard error.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from bridge_cg_plugin.announce import rank
from bridge_cg_plugin.cli.answers import answered
from bridge_cg_plugin.cli.launch import slurm, torchrun
from bridge_cg_plugin.cli.runs import first_look
from bridge_cg_plugin.cli.runs.first_look import check_start, check_with_bridge, gpus_of, starts_elsewhere
from bridge_cg_plugin.cli.runs.recipe import Prepared, prepare, quick_imports, quiet, require_gpu, train
from bridge_cg_plugin.cli.runs.recipe_arguments import check_launch, job_of, read, worker_arguments
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.options.flags import as_typed
from bridge_cg_plugin.upstream.hooks.configuration.training_config import environment


def main(arguments: Sequence[str] | None = None, script: str = __file__) -> int:
    """Run the command line; returns the exit status, 2 for input that is refused.

    Args:
        arguments: The command line; None is this process's.
        script: What a launcher starts.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parsed, words = read(given, __doc__)
        check_launch(parsed)
        if _looks_first(parsed) and (refused := first_look.refusal(given)):
            print(refused, file=sys.stderr)
            return 2
        if parsed.launcher != "none" and not parsed.dry_run:
            start = torchrun if parsed.launcher == "torchrun" else slurm
            start(job_of(parsed), str(Path(script).resolve()), worker_arguments(given))
            return 0
        if not parsed.dry_run:
            require_gpu()
        with contextlib.redirect_stdout(sys.stderr):  # only the answer goes to standard output
            run = _looked_over(parsed, words) if parsed.dry_run else prepare(parsed, words)
    except OptionError as error:
        print(as_typed(error, given), file=sys.stderr)
        return 2
    answer = f"{parsed.recipe}: {run.mode}() with {run.step}\n{run.summary}"
    if parsed.dry_run:
        return answered(answer) if rank() == 0 else 0
    if rank() == 0:
        print(answer, flush=True)
    train(run)
    return 0


def _looked_over(parsed: argparse.Namespace, words: Sequence[str]) -> Prepared:
    """Return a run that could start, in the environment that the command line gives its workers.

    Raises:
        OptionError: It could not.
    """
    with quiet(), quick_imports(), environment(job_of(parsed).environment):
        run = prepare(parsed, words)
        check_start(parsed.recipe, run.config, run.mode, gpus_of(parsed), starts_elsewhere(parsed))
        check_with_bridge(parsed.recipe, run.config, gpus_of(parsed))
    return run


def _looks_first(parsed: argparse.Namespace) -> bool:
    """Return whether a first look saves time: not for a worker, nor for a process that has PyTorch already."""
    return (parsed.launcher != "none" or parsed.dry_run) and "torch" not in sys.modules


if __name__ == "__main__":
    sys.exit(main())
