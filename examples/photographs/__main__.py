"""python -m examples.photographs: train on photographs eager and with vision graphs and compare.

With a GPU it trains Qwen3-VL through Bridge's pretrain(); without one, the vision tower on the CPU.
"""

import argparse
import sys
from pathlib import Path

import torch


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(prog="python -m examples.photographs", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="optimizer steps (50 on a GPU, 8 without)")
    parser.add_argument("--single", action="store_true", help="every sample is one 448 x 448 image")
    parser.add_argument("--small", action="store_true", help="a tower of 6 layers, for tests")
    parser.add_argument("--validate-every", type=int, default=0, help="steps between evaluations")
    parser.add_argument("--text-only-every", type=int, default=0, help="every how many samples one has no image")
    parser.add_argument("--no-overlap", action="store_true", help="no overlap of communication and compute")
    parser.add_argument("--save", help="checkpoint folder to write")
    parser.add_argument("--load", help="checkpoint folder to resume from")
    parser.add_argument("--eager-runs", type=int, default=3, help="eager runs that make the spread, at least 2")
    parser.add_argument(
        "--side-by-side", action="store_true", help="eager runs after the first share the GPU; their times do not count"
    )
    parser.add_argument("--records", type=Path, help="write benchmark records to this file")
    parser.add_argument("--train", choices=("eager", "graphs"), help="train once in this process, without comparison")
    parser.add_argument("--out", type=Path, help="with --train: where to write the run's figures")
    parser.add_argument("overrides", nargs="*", help="fields of the model provider, as name=value")
    return parser.parse_intermixed_args()


def main() -> int:
    """Run the main job."""
    args = parse()
    if args.train:
        return train_once(args)
    if not torch.cuda.is_available():
        from .cpu import main as run_cpu

        return run_cpu(args.steps or 8)
    from .gpu import main as run_gpu

    steps = args.steps or 50
    return run_gpu(steps, args.eager_runs, training_arguments(args, steps), args.records, args.side_by_side)


def training_arguments(args: argparse.Namespace, steps: int) -> list[str]:
    """Return the command line of each single run."""
    arguments = ["--steps", str(steps), *args.overrides]
    for name in ("single", "small", "no_overlap"):
        if getattr(args, name):
            arguments.append("--" + name.replace("_", "-"))
    for name in ("validate_every", "text_only_every", "save", "load"):
        if getattr(args, name):
            arguments += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    return arguments


def train_once(args: argparse.Namespace) -> int:
    """Train in this process."""
    import yaml

    from .training import Run, train

    train(
        Run(
            impl="transformer_engine" if args.train == "graphs" else "none",
            steps=args.steps or 50,
            overrides={k: yaml.safe_load(v) for k, v in (o.split("=", 1) for o in args.overrides)},
            single=args.single,
            validate_every=args.validate_every,
            text_only_every=args.text_only_every,
            overlap=not args.no_overlap,
            save=args.save,
            load=args.load,
            small=args.small,
        ),
        args.out,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
