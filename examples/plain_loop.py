"""python -m examples.plain_loop: a training loop of its own over megatron-core's schedule, eager or with vision graphs.

With a GPU it trains Qwen3-VL on photographs; without one, its vision tower with a small head. The loop knows nothing of
graphs but one call, `bridge_cg_plugin.enable`. With --compare it trains several times, each in a process of its own.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

import bridge_cg_plugin
from bridge_cg_plugin.upstream.hooks.graph_helper import active_graphs
from bridge_cg_tools.benchmarks.photographs.comparison import compare
from bridge_cg_tools.benchmarks.runs.processes import TrainingProcess

from .plain_jobs import Job, build

# Microbatches of step after step; RL loops have another count at every step too.
MICROBATCHES = (4, 2, 3)
CASE = "plain_loop"  # in records
GRAPHS = "vision_cuda_graph_impl=transformer_engine"


def train(job: Job, steps: int) -> dict[str, Any]:
    """Train, and return losses, gradient norms, step times in ms, peak memory in GiB and the graphs' figures."""
    result: dict[str, Any] = {"losses": [], "grad_norms": [], "step_ms": []}
    for step in range(steps):
        began = now()
        microbatches = MICROBATCHES[step % len(MICROBATCHES)]
        job.zero_gradients()
        found = get_forward_backward_func()(
            forward_step_func=job.forward_step,
            data_iterator=job.batches,
            model=job.model,
            num_microbatches=microbatches,
            seq_length=job.sequence,
            micro_batch_size=1,
            forward_only=False,
        )
        result["grad_norms"].append(float(job.update()))
        result["losses"].append(sum(float(each["loss"]) for each in found) / microbatches)
        result["step_ms"].append((now() - began) * 1e3)
        print(f"step {step}: loss {result['losses'][-1]:.6f}, {microbatches} microbatches", flush=True)
    graphs = [each.statistics().as_dict() for each in active_graphs()]
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {**result, "peak_gb": peak, "graphs": graphs[0] if graphs else None}


def now() -> float:
    """Return seconds after all that the GPU was given is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def train_words(words: Sequence[str]) -> None:
    """Train once, as a command line says."""
    args = parse(words)
    job = build(args.small)
    if args.train == "graphs":
        bridge_cg_plugin.enable(job.model, GRAPHS, *job.options, *args.options)
    with job.running():
        result = train(job, args.steps)
    if args.out is not None:
        args.out.write_text(json.dumps(result))


def compare_runs(args: argparse.Namespace) -> bool:
    """Train eager several times and on graphs once, print all and a verdict, and return whether they train the same.

    The verdict is printed and recorded after the second eager run and after each later one: time may be up before the
    last.
    """
    processes = [TrainingProcess(module="examples.plain_loop") for _ in range(args.eager_runs + 1)]
    arguments = ["--steps", str(args.steps), *(["--small"] if args.small else []), *args.options]
    same = False
    try:
        for process in processes:
            process.wait_until_ready()
        first, second, *others = processes
        eager, graphs = [first.train("eager", arguments)], second.train("graphs", arguments)
        for process in others:
            eager.append(process.train("eager", arguments))
            same = compare(eager, graphs, [], args.steps, args.records, CASE)
    finally:
        for process in processes:
            process.close()
    return same


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of a command line, this process's where none is given."""
    parser = argparse.ArgumentParser(prog="python -m examples.plain_loop", description="Train by a loop of its own.")
    parser.add_argument("--train", choices=("eager", "graphs"), default="graphs", help="how to train in this process")
    parser.add_argument("--compare", action="store_true", help="train both ways in other processes and compare")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps, more than 6 with --compare")
    parser.add_argument("--eager-runs", type=int, default=3, help="eager runs that make the spread, at least 2")
    parser.add_argument("--small", action="store_true", help="on a GPU, a tower of 6 layers and few image sizes")
    parser.add_argument("--out", type=Path, help="where to write the run's figures as JSON")
    parser.add_argument("--records", type=Path, help="with --compare, write benchmark records to this file")
    parser.add_argument("options", nargs="*", help="graph options, as name=value")
    return parser.parse_intermixed_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Train or compare, as a command line says; returns the exit status."""
    if parse(words).compare:
        return 0 if compare_runs(parse(words)) else 1
    train_words(sys.argv[1:] if words is None else words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
