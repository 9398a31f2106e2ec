"""Train like run_recipe.py and write what the run did as one JSON record; `compare.py` starts it for every mode.

    python scripts/performance/recorded_run.py --record eager.json --as eager --recipe NAME train.train_iters=20

What follows `--record` and `--as` is a command line of run_recipe.py. Nothing is resumed or saved and no event
files are written: runs that are compared start alike, from `checkpoint.pretrained_checkpoint` if the recipe wants one.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_cg_plugin.options import PROVIDER_FIELDS, OptionError  # noqa: E402
from bridge_cg_tools.report.runs import WARM_UP  # noqa: E402
from scripts.performance import run_recipe  # noqa: E402

KINDS = ("eager", "upstream", "plugin")


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return this script's arguments and those of run_recipe.py."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--record", type=Path, required=True, metavar="FILE", help="where the record is written")
    parser.add_argument(
        "--as", dest="kind", choices=KINDS, required=True, help="upstream: with the plugin switched off"
    )
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train once; returns the exit status, 2 for input that is refused."""
    args, rest = parse(arguments)
    try:
        run = run_recipe.prepare(*run_recipe.read(rest))
        leave_nothing(run.config)
        if args.kind == "upstream":
            run = with_upstreams_graphs(run)
    except OptionError as error:
        print(f"OptionError: {error}", file=sys.stderr)
        return 2
    from scripts.performance.recorder import Recorder
    from scripts.performance.results import provenance

    print(f"{run.mode}() with {run.step}, {args.kind}\n{run.summary}", flush=True)
    recorder = Recorder()
    run_recipe.train(run, [recorder])
    if is_first():
        repeats = max(len(recorder.step_ms) - WARM_UP, 0)
        origin = provenance(repeats, int(run.config.rng.seed))
        args.record.write_text(json.dumps({**recorder.record(), **origin}))
    return 0


def leave_nothing(config: Any) -> None:
    """Keep a configuration from resuming another run, and from writing checkpoints and event files."""
    config.checkpoint.load = config.checkpoint.save = config.checkpoint.save_interval = None
    config.logger.tensorboard_dir = None


def with_upstreams_graphs(run: run_recipe.Prepared) -> run_recipe.Prepared:
    """Switch the plugin off and return the run with upstream's own functions.

    Communication does not overlap then: capture of upstream's graphs aborts under `overlap_param_gather`.

    Raises:
        OptionError: The installed release has no vision graphs.
    """
    import bridge_cg_plugin
    from bridge_cg_plugin.upstream.hooks.steps import forward_step
    from bridge_cg_plugin.upstream.seams.registry.training import TRAIN

    bridge_cg_plugin.deactivate()
    importlib.import_module(TRAIN)
    from bridge_cg_plugin.upstream.hooks.train_loop import drives_vision_graphs

    if getattr(run.config.model, PROVIDER_FIELDS["impl"], "none") != "none" and not drives_vision_graphs():
        raise OptionError("as", "upstream", "eager or plugin", "The installed release has no vision graphs.")
    overlap = getattr(run.config, "comm_overlap", None)
    for section in (run.config.ddp, overlap, getattr(overlap, "user_comm_overlap_cfg", None)):
        if section is not None:
            section.overlap_param_gather = section.overlap_grad_reduce = False
    return replace(run, forward_step=forward_step(run.step, run.mode))


def is_first() -> bool:
    """Whether this process is rank 0; torchrun says which it is."""
    return os.environ.get("RANK", "0") == "0"


if __name__ == "__main__":
    sys.exit(main())
