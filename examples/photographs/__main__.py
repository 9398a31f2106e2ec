"""python -m examples.photographs: train on photographs eager and with vision graphs and compare.

With a GPU it trains Qwen3-VL through Bridge's pretrain(); without one, the vision tower on the CPU. Over several GPUs
it starts its own processes; torchrun may start it as well.
"""

import importlib
import logging
import os
import sys
import warnings
from argparse import Namespace
from typing import Any

from examples.photographs.arguments import layout_of, parse, training_arguments

NEXT = """next: bridge-cg explain RECIPE cuda_graphs=exact    what a recipe of yours gets on graphs, and why
      docs/getting_started.md                       how to switch graphs on"""


def main() -> int:
    """Run the main job, or one training run of it."""
    args = parse()
    layout_of(args).check_processes(os.environ.get("WORLD_SIZE"))
    if args.train:
        from examples.photographs.training import train_once

        train_once(args)
        return 0
    if int(os.environ.get("RANK", 0)):
        return 0  # torchrun's first process starts those that train, one run after the other
    print("Training on photographs, eager and on graphs. Importing Megatron-Bridge takes up to a minute.", flush=True)
    status = _compared(args)
    if status == 0:
        print(NEXT)
    return status


def _compared(args: Namespace) -> int:
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the processes that train, too
    if not _imported("torch").cuda.is_available():
        return int(_imported("examples.photographs.cpu").main(args.steps or 8))
    from .gpu import main as run_gpu

    layout_of(args).check_gpus(_imported("torch").cuda.device_count())
    steps = args.steps or 50
    return run_gpu(steps, args.eager_runs, training_arguments(args, steps))


def _imported(name: str) -> Any:
    """Import a module without what upstream's packages warn of while they load."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        return importlib.import_module(name)
    finally:
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    sys.exit(main())
