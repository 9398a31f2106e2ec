"""Train as `bridge-cg train` does and write what the run did as one JSON record, for `bridge-cg compare`.

    python -m bridge_cg_plugin.cli.runs.recorded_run --record eager.json --as eager --recipe NAME

What follows `--record` and `--as` is a command line of `bridge-cg train`. Nothing is resumed or saved and no event
files are written: runs that are compared start alike, from `checkpoint.pretrained_checkpoint` if the recipe wants one.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bridge_cg_plugin.cli.report.runs import WARM_UP
from bridge_cg_plugin.cli.runs.recipe import prepare, train
from bridge_cg_plugin.cli.runs.recipe_arguments import read
from bridge_cg_plugin.cli.runs.recorded import KINDS, is_first, leave_nothing, with_upstreams_graphs
from bridge_cg_plugin.options import OptionError


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return this command's arguments and those of `bridge-cg train`."""
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
        run = prepare(*read(rest))
        leave_nothing(run.config)
        if args.kind == "upstream":
            run = with_upstreams_graphs(run)
    except OptionError as error:
        print(f"OptionError: {error}", file=sys.stderr)
        return 2
    from bridge_cg_plugin.cli.runs.recorder import Recorder
    from bridge_cg_plugin.cli.runs.results import provenance

    print(f"{run.mode}() with {run.step}, {args.kind}\n{run.summary}", flush=True)
    recorder = Recorder()
    train(run, [recorder])
    if is_first():
        repeats = max(len(recorder.step_ms) - WARM_UP, 0)
        origin = provenance(repeats, int(run.config.rng.seed))
        args.record.write_text(json.dumps({**recorder.record(), **origin}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
