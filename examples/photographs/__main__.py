"""python -m examples.photographs: train on photographs eager and with vision graphs and compare.

With a GPU it trains Qwen3-VL through Bridge's pretrain(); without one, the vision tower on the CPU. Over several GPUs
it starts its own processes; torchrun may start it as well.
"""

import os
import sys

import torch

from examples.photographs.arguments import layout_of, parse, training_arguments


def main() -> int:
    """Run the main job, or one training run of it."""
    args = parse()
    layout_of(args).check_processes(os.environ.get("WORLD_SIZE"))
    if args.train:
        from examples.photographs.training import train_once

        train_once(args)
        return 0
    if not torch.cuda.is_available():
        from .cpu import main as run_cpu

        return run_cpu(args.steps or 8)
    if int(os.environ.get("RANK", 0)):
        return 0  # torchrun's first process starts those that train, one run after the other
    from .gpu import main as run_gpu

    layout_of(args).check_gpus(torch.cuda.device_count())
    steps = args.steps or 50
    arguments = training_arguments(args, steps)
    return run_gpu(steps, args.eager_runs, arguments)


if __name__ == "__main__":
    sys.exit(main())
