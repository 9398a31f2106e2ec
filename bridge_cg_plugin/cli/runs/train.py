r"""Train any recipe of Bridge or preset of the plugin, with graph flags.

    bridge-cg train qwen3_vl_8b_pretrain_mock_config --graphs h200 --dry-run
    torchrun --nproc_per_node=4 -m bridge_cg_plugin.cli.runs.train \
        qwen3_vl_8b_pretrain_mock_config --graphs h200 train.train_iters=50

Flags are applied first, then overrides `section.name=value`; later ones win.
`--dry-run` prints what all of it resolves to. Exit status 2 means refused
input; the reason is on standard error.
"""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bridge_cg_plugin.announce import rank
from bridge_cg_plugin.cli.answers import say, wrapped
from bridge_cg_plugin.cli.checks import check_bridge, check_start
from bridge_cg_plugin.cli.report.runs import WARM_UP
from bridge_cg_plugin.cli.runs import first_look
from bridge_cg_plugin.cli.runs.recipe import (
    Prepared,
    leave_nothing,
    prepare,
    quick_imports,
    quiet,
    read,
    require_gpu,
    torchrun,
    train,
)
from bridge_cg_plugin.options import OptionError


def main(arguments: Sequence[str] | None = None, script: str = __file__) -> int:
    """Run the command line; returns the exit status, 2 for input that is refused.

    Args:
        arguments: The command line; None is this process's.
        script: What a launcher starts.
    """
    given, looked, missing = list(sys.argv[1:] if arguments is None else arguments), "", ""
    try:
        parsed, words = read(given, __doc__)
        # A worker, or a process that has PyTorch already, saves no time by a first look.
        looks_first = (parsed.launcher != "none" or parsed.dry_run) and "torch" not in sys.modules
        status, looked = first_look.looked(given) if looks_first else (0, looked)
        if status == first_look.REFUSED:
            print(looked, file=sys.stderr)
            return 2
        if status == first_look.ALONE:
            say(*wrapped(*looked.splitlines()))
            return 0
        if parsed.launcher == "torchrun" and not parsed.dry_run:
            command = [*torchrun(parsed.gpus_per_node), str(Path(script).resolve()), *given, "--launcher", "none"]
            os.execvp(command[0], command)
        if not parsed.dry_run:
            require_gpu()
        with contextlib.redirect_stdout(sys.stderr):  # only the answer goes to standard output
            if not parsed.dry_run:
                run = prepare(parsed, words)
                if parsed.record is not None:
                    leave_nothing(run.config)
            else:
                with quiet(), quick_imports():
                    run, gpus = prepare(parsed, words), first_look.gpus_of(parsed)
                    missing = check_start(run.config, run.mode, gpus, dry=True)
                    check_bridge(parsed.recipe, run.config, run.options, gpus)
    except OptionError as error:
        if looked and isinstance(error.__cause__, RuntimeError):  # building it asks for a GPU
            say(*wrapped(*looked.splitlines()))
            return 0
        print(error, file=sys.stderr)
        return 2
    if rank() == 0:
        answer = first_look.dry_run(parsed.recipe, run.mode, run.step, run.options, missing)
        say(*wrapped(*answer.splitlines()))
    if parsed.dry_run:
        return 0
    if parsed.record is None:
        train(run)
    else:
        record(run, parsed.record)
    return 0


def record(run: Prepared, file: Path) -> None:
    """Train and write what the run did as one JSON record, for `bridge-cg compare`."""
    from bridge_cg_plugin.cli.runs.recorder import Recorder
    from bridge_cg_plugin.cli.runs.results import provenance

    recorder = Recorder()
    train(run, [recorder])
    if rank() == 0:
        origin = provenance(max(len(recorder.step_ms) - WARM_UP, 0), int(run.config.rng.seed))
        file.write_text(json.dumps({**recorder.record(), **origin}))


if __name__ == "__main__":
    sys.exit(main())
