"""Which sizes an encoder is captured for: what warm-up steps showed, what options say, what memory allows."""

import math
from collections import deque
from collections.abc import Callable, Iterable

from ..attention_bounds import deterministic, replay_cost
from ..graphs.errors import CaptureError
from ..graphs.planning.buckets import Bucket, BucketPlan, any_size, named_buckets, plan_buckets, raised
from ..graphs.planning.demand import WINDOW
from ..graphs.program import RegionProgram
from ..graphs.recordings.executor import Executor
from ..graphs.reports.report import GIB
from ..options import PROVIDER_FIELDS, VisionGraphOptions
from .adapter import EncoderAdapter, EncoderBatch
from .memory import measure_memory
from .shape import Shape

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
        observed: Tokens of every observed microbatch.
        last: Shapes of the last of them.
    """

    def __init__(self, options: VisionGraphOptions, adapter: EncoderAdapter) -> None:
        self._options, self._adapter = options, adapter
        self.observed: list[int] = []
        self.last: deque[Shape] = deque(maxlen=WINDOW)
        self._frames = 0

    def observe(self, batch: EncoderBatch) -> None:
        """Take a microbatch of the warm-up steps into account."""
        self.observed.append(batch.tokens)
        self.last.append(batch.shape)
        self._frames = max(self._frames, batch.shape.frames)

    @property
    def microbatches(self) -> int:
        """Microbatches that were observed."""
        return len(self.observed)

    def buckets(
        self, limit: float, headroom: float = 1.0, last_alike: Callable[[int, int], int] = any_size
    ) -> BucketPlan:
        """Return the capacities to capture.

        Args:
            limit: The most tokens that a bucket may have, infinity where nothing limits it.
            headroom: How far capacities reach beyond the largest size that was seen, as a factor.
            last_alike: See `plan_buckets`.

        Raises:
            ValueError: Nothing was observed and no option sets the size of buckets.
        """
        options = self._options
        if options.buckets != "auto":
            capacities = options.buckets
            if options.max_seq_length is not None:
                capacities = (*(c for c in capacities if c < options.max_seq_length), options.max_seq_length)
            return BucketPlan(tuple(capacities), 0.0, 0)
        return plan_buckets(
            self.observed,
            largest=options.max_seq_length,
            merge_unit=self._adapter.unit,
            capacity_limit=None if limit == math.inf else int(limit),
            exact_below=options.exact_below,
            headroom=headroom,
            last_alike=last_alike,
        )

    def buckets_of(self, capacity: int, directly: bool, shapes: Iterable[Shape] = ()) -> list[Bucket]:
        """Return the whole encoder's buckets of a capacity, cheapest first: with limits that were named, or all useful.

        Args:
            capacity: Tokens.
            directly: Whether cuDNN's attention is called directly.
            shapes: Microbatches after warm-up.

        Raises:
            CaptureError: Named limits are not of this encoder.
        """
        usual = [
            Bucket(capacity, limits) for limits in self._adapter.bounds(capacity, self.max_frames(shapes), directly)
        ]
        named = sorted(named_buckets(self._options.bucket_limits, capacity), key=replay_cost)
        if wrong := [bucket for bucket in named if len(bucket.limits) != len(usual[0].limits)]:
            raise CaptureError(
                f"{PROVIDER_FIELDS['bucket_limits']}: a bucket of this encoder is written as {usual[0]}, not {wrong[0]}"
            )
        return named or usual

    @property
    def largest(self) -> float:
        """The most tokens that the options allow a bucket, infinity where they do not say."""
        return self._options.max_seq_length or math.inf

    def may_reach_further(self) -> bool:
        """Whether capacities beyond the largest size that was seen are wanted."""
        options = self._options
        chosen_once = options.buckets == "auto" and not options.on_demand
        return chosen_once and options.max_seq_length is None and options.headroom > 1

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
