"""Train as `bridge-cg train` does and write what the run did as one JSON record, for `bridge-cg compare`.

    python -m bridge_cg_plugin.cli.runs.recorded_run --record eager.json --recipe NAME

What follows `--record` is a command line of `bridge-cg train`. Nothing is resumed or saved and no event
files are written: runs that are compared start alike, from `checkpoint.pretrained_checkpoint` if the recipe wants one.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge_cg_plugin.cli.report.runs import WARM_UP
from bridge_cg_plugin.cli.runs.recipe import prepare, read, train
from bridge_cg_plugin.options import OptionError


def leave_nothing(config: Any) -> None:
    """Keep a configuration from resuming another run, and from writing checkpoints and event files."""
    config.checkpoint.load = config.checkpoint.save = config.checkpoint.save_interval = None
    config.logger.tensorboard_dir = None


def is_first() -> bool:
    """Whether this process is rank 0; torchrun says which it is."""
    return os.environ.get("RANK", "0") == "0"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train once; returns the exit status, 2 for input that is refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--record", type=Path, required=True, metavar="FILE", help="where the record is written")
    args, rest = parser.parse_known_args(arguments)
    try:
        run = prepare(*read(rest))
        leave_nothing(run.config)
    except OptionError as error:
        print(f"OptionError: {error}", file=sys.stderr)
        return 2
    from bridge_cg_plugin.cli.runs.recorder import Recorder
    from bridge_cg_plugin.cli.runs.results import provenance

    print(f"{run.mode}() with {run.step}\n{run.summary}", flush=True)
    recorder = Recorder()
    train(run, [recorder])
    if is_first():
        repeats = max(len(recorder.step_ms) - WARM_UP, 0)
        origin = provenance(repeats, int(run.config.rng.seed))
        args.record.write_text(json.dumps({**recorder.record(), **origin}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
