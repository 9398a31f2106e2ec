"""Which sizes an encoder is captured for: what warm-up steps showed, what options say, what memory allows."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..attention_bounds import deterministic, replay_cost
from ..graphs.planning.buckets import Bucket, raised
from ..graphs.planning.demand import WINDOW, Menu
from ..graphs.program import RegionProgram
from ..graphs.recordings.executor import Executor, run_once
from ..graphs.recordings.parameters import ParameterAliases
from ..graphs.recordings.recording import RegionBody
from ..graphs.replays.gradients import GradientSinks
from ..graphs.replays.slot import StaticTensors
from ..graphs.reports.report import GIB
from ..options import VisionGraphOptions
from .adapter import EncoderAdapter, EncoderBatch
from .fit import Shape

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
    buffers = StaticTensors(executor.device).buffers(program.input_specs(bucket))
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


# Frames that the most permissive bounds take; a batch of fewer uses cheaper bounds.
DEFAULT_MAX_FRAMES = 64
MAX_FRAMES_STEP = 16
# A pool's segments are not filled to the brim; measured pools are at most this part fuller than their tensors.
MEMORY_MARGIN = 0.8


class EncoderPlan:
    """Observes an encoder's microbatches and plans buckets for them.

    Args:
        options: What the user asked for.
        adapter: The encoder's.

    Attributes:
        microbatches: How many were observed.
        last: Shapes of the last of them.
    """

    def __init__(self, options: VisionGraphOptions, adapter: EncoderAdapter) -> None:
        self._options, self._adapter = options, adapter
        self.microbatches = 0
        self.last: deque[Shape] = deque(maxlen=WINDOW)
        self._frames = 0

    def observe(self, batch: EncoderBatch) -> None:
        """Take a microbatch of the warm-up steps into account."""
        self.microbatches += 1
        self.last.append(batch.shape)
        self._frames = max(self._frames, batch.shape.frames)

    def named(self) -> tuple[int, ...]:
        """Return the capacities that the options name; none of automatic buckets."""
        buckets, longest = self._options.named_buckets, self._options.max_seq_length
        return buckets if not buckets or longest is None else (*(c for c in buckets if c < longest), longest)

    def buckets_of(self, capacity: int, directly: bool, shapes: Iterable[Shape] = ()) -> list[Bucket]:
        """Return the whole encoder's useful buckets of a capacity, cheapest first.

        Args:
            capacity: Tokens.
            directly: Whether cuDNN's attention is called directly.
            shapes: Microbatches after warm-up.
        """
        return [
            Bucket(capacity, limits) for limits in self._adapter.bounds(capacity, self.max_frames(shapes), directly)
        ]

    @property
    def largest(self) -> float:
        """The most tokens that the options allow a bucket, infinity where they do not say."""
        return self._options.max_seq_length or math.inf

    def max_frames(self, shapes: Iterable[Shape] = ()) -> int:
        """Return how many frames the most permissive bounds take.

        Args:
            shapes: Microbatches after warm-up.
        """
        if self._options.max_frames != "auto":
            return self._options.max_frames
        wanted = 2 * self._frames
        planned = max(DEFAULT_MAX_FRAMES, -(-wanted // MAX_FRAMES_STEP) * MAX_FRAMES_STEP)
        return raised(planned, max((shape.frames for shape in shapes), default=0))

    def capacity_limit(self, executor: Executor, program: Callable[[], RegionProgram], directly: bool) -> float:
        """Return the most tokens that a bucket may have on this rank, infinity where nothing limits it.

        Args:
            executor: Measures memory.
            program: Returns the whole encoder.
            directly: Whether cuDNN's attention is called directly.
        """
        options, adapter = self._options, self._adapter
        limits = [adapter.deterministic_tokens] if deterministic() else []
        if options.buckets_max_gb is not None and executor.device.type == "cuda":
            memory = measure_memory(
                executor, program(), adapter.unit, lambda tokens: adapter.bounds(tokens, 1, directly)[0]
            )
            limits.append(memory.tokens_within(options.buckets_max_gb * GIB * MEMORY_MARGIN))
        return min(limits, default=math.inf)

    def menu(self, program: RegionProgram, buckets_of: Callable[[int, Sequence[Shape]], Sequence[Bucket]]) -> Menu:
        """Return what may be captured on demand for a program; arguments as of `Menu`."""
        return Menu(
            buckets_of=buckets_of,
            refuse=program.refuse,
            cost=replay_cost,
            unit=self._adapter.unit,
            exact_below=self._options.exact_below,
            capacities=self._options.named_buckets,
        )
