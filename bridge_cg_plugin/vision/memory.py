"""How much memory a region's activations take, measured before any graph is captured."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..graphs.planning.buckets import Bucket
from ..graphs.program import RegionProgram
from ..graphs.recordings.executor import Executor, run_once
from ..graphs.recordings.parameters import ParameterAliases
from ..graphs.recordings.recording import RegionBody
from ..graphs.replays.gradients import GradientSinks
from ..graphs.replays.slot import Arena

# Large enough that activations outweigh what does not grow with the batch.
PROBE_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Device memory of a bucket's forward and backward, in bytes: `fixed + per_token * tokens`."""

    fixed: float
    per_token: float

    def tokens_within(self, limit: float) -> int:
        """Return the largest capacity that `limit` bytes hold, 0 if they hold none."""
        return max(int((limit - self.fixed) / self.per_token), 0)


def measure_memory(
    executor: Executor, program: RegionProgram, unit: int, limits: Callable[[int], tuple[int, ...]]
) -> MemoryModel:
    """Measure the memory of two probes on the GPU and fit the line through them.

    Args:
        executor: Runs them.
        program: What is measured.
        unit: Capacities are multiples of it.
        limits: Returns the limits of a probe of so many tokens.
    """
    small = max(PROBE_TOKENS // unit, 1) * unit
    buckets = [Bucket(tokens, limits(tokens)) for tokens in (small, 2 * small)]
    less, more = (_peak(executor, program, bucket) for bucket in buckets)
    per_token = max((more - less) / small, 1.0)
    return MemoryModel(max(less - per_token * small, 0.0), per_token)


def _peak(executor: Executor, program: RegionProgram, bucket: Bucket) -> int:
    aliases = ParameterAliases(program.modules())
    arena = Arena(executor.device)
    buffers = arena.buffers(program.input_specs(bucket))
    program.load_example(buffers, bucket)
    body = RegionBody(program, buffers, bucket, aliases, GradientSinks(aliases.trainable))
    peaks = []
    for _ in range(2):
        torch.cuda.synchronize(executor.device)
        torch.cuda.reset_peak_memory_stats(executor.device)
        before = torch.cuda.memory_allocated(executor.device)
        with executor.isolated():
            run_once(body, lambda outputs: tuple(torch.zeros_like(o) for o in outputs))
        body.forget()
        peaks.append(torch.cuda.max_memory_allocated(executor.device) - before)
    return peaks[-1]
