"""Which sizes an encoder is captured for: what warm-up steps showed, and what options say."""

import math
from collections import deque
from collections.abc import Iterable, Sequence

from ..attention_bounds import deterministic, replay_cost
from ..graphs.planning.buckets import Bucket, raised
from ..graphs.planning.demand import WINDOW, Menu
from ..options import VisionGraphOptions
from .batch import EncoderBatch
from .encoder import Encoder, RecordedKernels
from .fit import Shape

# Frames that the most permissive bounds take; a batch of fewer uses cheaper bounds.
DEFAULT_MAX_FRAMES = 64
MAX_FRAMES_STEP = 16


class EncoderPlan:
    """Observes an encoder's microbatches and plans buckets for them.

    Args:
        options: What the user asked for.
        encoder: The encoder.
        kernels: What its recordings call.

    Attributes:
        microbatches: How many were observed.
        last: Shapes of the last of them.
    """

    def __init__(self, options: VisionGraphOptions, encoder: Encoder, kernels: RecordedKernels) -> None:
        self._options, self._encoder, self._kernels = options, encoder, kernels
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

    def buckets_of(self, capacity: int, shapes: Sequence[Shape] = ()) -> list[Bucket]:
        """Return the useful buckets of a capacity, cheapest first.

        Args:
            capacity: Tokens.
            shapes: Microbatches after warm-up.
        """
        bounds = self._encoder.bounds(capacity, self.max_frames(shapes), self._kernels.attends_directly)
        return [Bucket(capacity, limits) for limits in bounds]

    @property
    def largest(self) -> float:
        """The most tokens that a bucket may have, infinity where nothing limits it."""
        limits = [self._encoder.deterministic_tokens] if deterministic() else []
        return min([*limits, self._options.max_seq_length or math.inf])

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

    def menu(self) -> Menu:
        """Return what may be captured on demand."""
        return Menu(
            buckets_of=self.buckets_of,
            refuse=self._encoder.refuse,
            cost=replay_cost,
            unit=self._encoder.unit,
            exact_below=self._options.exact_below,
            capacities=self._options.named_buckets,
        )
