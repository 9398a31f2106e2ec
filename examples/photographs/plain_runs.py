"""Runs of a plain training loop: its command line, what is measured of it, and the comparison of eager with graphs."""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_graphs
from examples.photographs.comparison import compare
from examples.photographs.processes import TrainingProcess
from scripts.performance.measure import synchronize

# A step's mean loss, gradient norm and number of microbatches.
Step = tuple[float, float, int]
Run = dict[str, Any]


def command(words: Sequence[str] | None, module: str, run: Callable[[argparse.Namespace], Run]) -> int:
    """Train or compare, as a command line says, and return the exit status.

    Args:
        words: The command line; None for this process's.
        module: What the loop's program is called; it has `train_words`, see `TrainingProcess`.
        run: Trains in this process.
    """
    args = parse(words, module)
    if args.compare:
        return 0 if compare_runs(args, module) else 1
    result = run(args)
    if args.out is not None:
        args.out.write_text(json.dumps(result))
    return 0


def parse(words: Sequence[str] | None, module: str) -> argparse.Namespace:
    """Return the arguments of a command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description="Train by a loop of its own.")
    parser.add_argument("--train", choices=("eager", "graphs"), default="graphs", help="how to train in this process")
    parser.add_argument("--compare", action="store_true", help="train both ways in other processes and compare")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps, more than 6 with --compare")
    parser.add_argument("--eager-runs", type=int, default=3, help="eager runs that make the spread, at least 2")
    parser.add_argument("--small", action="store_true", help="on a GPU, a tower of 6 layers and few image sizes")
    parser.add_argument("--out", type=Path, help="where to write the run's figures as JSON")
    parser.add_argument("options", nargs="*", help="graph options, as name=value")
    return parser.parse_intermixed_args(words)


def measured(steps: Iterator[Step]) -> Run:
    """Train to the end, and return losses, gradient norms, step times in ms, peak memory in GiB and graphs' figures."""
    losses: list[float] = []
    norms: list[float] = []
    step_ms: list[float] = []
    began = now()
    for loss, norm, microbatches in steps:
        step_ms.append((now() - began) * 1e3)
        print(f"step {len(losses)}: loss {loss:.6f}, {microbatches} microbatches", flush=True)
        losses.append(loss)
        norms.append(norm)
        began = now()
    graphs = [each.statistics().as_dict() for each in active_graphs()]
    return {
        "losses": losses,
        "grad_norms": norms,
        "step_ms": step_ms,
        "peak_gb": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0,
        "graphs": graphs[0] if graphs else None,
    }


def now() -> float:
    """Return seconds after all that the GPU was given is done."""
    synchronize()
    return time.perf_counter()


def compare_runs(args: argparse.Namespace, module: str) -> bool:
    """Train eager several times and on graphs once, print all and a verdict, and return whether they train the same.

    The verdict is printed after the second eager run and after each later one: time may be up before the last.
    """
    processes = [TrainingProcess(module=module) for _ in range(args.eager_runs + 1)]
    arguments = ["--steps", str(args.steps), *(["--small"] if args.small else []), *args.options]
    same = False
    try:
        for process in processes:
            process.wait_until_ready()
        first, second, *others = processes
        eager, graphs = [first.train("eager", arguments)], second.train("graphs", arguments)
        for process in others:
            eager.append(process.train("eager", arguments))
            same = compare(eager, graphs, args.steps)
    finally:
        for process in processes:
            process.close()
    return same
