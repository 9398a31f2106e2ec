"""How much memory a region's activations take, measured before any graph is captured."""

import torch

from ..graphs.executor import Executor, run_once
from ..graphs.gradients import GradientSinks
from ..graphs.parameters import ParameterAliases
from ..graphs.program import Bucket, RegionProgram
from ..graphs.recording import RegionBody
from ..graphs.slot import Arena

# Large enough that activations outweigh what does not grow with the batch.
PROBE_TOKENS = 1024


def bytes_per_token(executor: Executor, program: RegionProgram, merge_unit: int) -> float:
    """Return the device memory that one token adds to forward and backward, in bytes.

    Two probes of different size leave out what does not grow with the batch. Without a GPU no limit binds: 1.
    """
    if executor.device.type != "cuda":
        return 1.0
    small = PROBE_TOKENS // merge_unit * merge_unit
    buckets = [Bucket(tokens, (1, tokens)) for tokens in (small, 2 * small)]
    less, more = (_peak(executor, program, bucket) for bucket in buckets)
    return max((more - less) / small, 1.0)


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
        run_once(body, lambda outputs: tuple(torch.zeros_like(o) for o in outputs))
        body.forget()
        peaks.append(torch.cuda.max_memory_allocated(executor.device) - before)
    return peaks[-1]
