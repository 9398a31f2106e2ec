"""python -m examples.plain_loop: a training loop of its own over megatron-core's schedule, eager or with vision graphs.

With a GPU it trains Qwen3-VL on photographs; without one, its vision tower with a small head. The loop knows nothing of
graphs but one call, `bridge_cg_plugin.enable`. With --compare it trains several times, each in a process of its own.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from megatron.core.pipeline_parallel import get_forward_backward_func

import bridge_cg_plugin
from examples.photographs import plain_runs

from .plain_jobs import Job, build

# Microbatches of step after step; RL loops have another count at every step too.
MICROBATCHES = (4, 2, 3)
GRAPHS = "vision_cuda_graph_impl=transformer_engine"


def train(job: Job, steps: int) -> Iterator[plain_runs.Step]:
    """Train; yields every step's mean loss, gradient norm and number of microbatches."""
    for step in range(steps):
        microbatches = MICROBATCHES[step % len(MICROBATCHES)]
        job.zero_gradients()
        losses = get_forward_backward_func()(
            forward_step_func=job.forward_step,
            data_iterator=job.batches,
            model=job.model,
            num_microbatches=microbatches,
            seq_length=job.sequence,
            micro_batch_size=1,
            forward_only=False,
        )
        norm = job.update()
        yield sum(float(each["loss"]) for each in losses) / microbatches, float(norm), microbatches


def run(args: argparse.Namespace) -> plain_runs.Run:
    """Train once, as a command line says, and return what the run was like."""
    job = build(args.small)
    if args.train == "graphs":
        bridge_cg_plugin.enable(job.model, GRAPHS, *job.options, *args.options)
    with job.running():
        return plain_runs.measured(train(job, args.steps))


def train_words(words: Sequence[str]) -> None:
    """Train once in a process that a comparison has started."""
    main(words)


def main(words: Sequence[str] | None = None) -> int:
    """Train or compare, as a command line says; returns the exit status."""
    return plain_runs.command(words, "examples.plain_loop", run)


if __name__ == "__main__":
    sys.exit(main())
