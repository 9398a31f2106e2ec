"""Whether moving images pays: what encoding takes by the patch, and what an exchange of rows takes by the byte.

Both are measured in the run itself. Every error leans to leaving images where they are: an exchange is taken to carry
all rows of the largest rank, not only those that move, and the time by the patch is the smallest that a rank knows of.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..batch import VisionBatch
from ..eager_costs import KEPT_SHAPES, Clock, Timing, watch_backward

# Moving must save so many times what it takes.
PAYS = 1.5
# Rows for each rank of the exchanges that are timed, and how often; the smallest time counts.
ROWS, REPEATS = (16, 1024), 4
# Exchanges of a microbatch: pixels there, embeddings back, their gradients there.
EXCHANGES = 3


class HostClock:
    """A `Clock` for work that has ended when its call returns."""

    def event(self) -> float:
        """See `Clock`."""
        return time.perf_counter()

    def elapsed(self, start: float, end: float) -> float:
        """See `Clock`."""
        return (end - start) * 1e3


class EncodingTimes:
    """What this rank's encoder took, forward plus backward, by the patches that it encoded.

    Args:
        clock: Measures.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ms: dict[int, float] = {}
        self._pending: list[tuple[Timing, int]] = []
        self._slope = 0

    def encode(self, batch: VisionBatch, encode: Callable[[VisionBatch], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return an encoder's outputs; it is timed if a backward follows."""
        if not torch.is_grad_enabled():
            return encode(batch)
        kept = self._pending
        timing = Timing(self._clock, lambda timing: kept.append((timing, batch.tokens)))
        outputs = encode(batch)
        if outputs[0].requires_grad:
            timing.forward_ended()
            watch_backward(timing, outputs[0])
        return outputs

    def forget(self) -> None:
        """Forget everything: from now on the encoder runs in another way."""
        self._ms, self._pending, self._slope = {}, [], 0

    def ns_per_patch(self) -> int:
        """Return what a further patch takes in ns, the slope of a line through the times; 0 while none is known."""
        if self._collect() and len(self._ms) > 1:
            slope = statistics.linear_regression(list(self._ms), list(self._ms.values())).slope
            self._slope = max(int(slope * 1e6), 0)
        return self._slope

    def _collect(self) -> bool:
        """Take over what has been measured since; whether there was anything."""
        waiting = []
        for timing, patches in self._pending:
            ms = timing.milliseconds()
            if ms is None:
                waiting.append((timing, patches))
            elif patches in self._ms or len(self._ms) < KEPT_SHAPES:
                self._ms[patches] = min(ms, self._ms.get(patches, math.inf))
        found = len(self._pending) - len(waiting)
        self._pending[:] = waiting
        return found > 0


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """What one exchange of rows between the ranks takes.

    Attributes:
        ms: However few bytes.
        ms_per_byte: More for every byte that a rank gives or gets.
    """

    ms: float
    ms_per_byte: float

    def of(self, patches: int, bytes_per_patch: int) -> float:
        """Return ms of a microbatch's exchanges.

        Args:
            patches: The most that a rank gives or gets.
            bytes_per_patch: Of a patch's pixels, its embeddings and their gradients.
        """
        return EXCHANGES * self.ms + patches * bytes_per_patch * self.ms_per_byte


def measured_cost(clock: Clock, exchange: Callable[[int], int], synchronize: Callable[[], None]) -> ExchangeCost:
    """Return what exchanges take on this rank; all ranks call it together.

    Args:
        clock: Measures.
        exchange: Exchanges so many rows with every rank, this one included; returns the bytes that it gave.
        synchronize: Waits until exchanges have ended.
    """

    def smallest(rows: int) -> tuple[int, float]:
        times: list[float] = []
        given = exchange(rows)  # the first one sets connections up
        for _ in range(REPEATS):
            synchronize()
            start = clock.event()
            exchange(rows)
            end = clock.event()
            synchronize()
            taken = clock.elapsed(start, end)
            if taken is None:
                raise RuntimeError("an exchange has not ended after the device was waited for")
            times.append(taken)
        return given, min(times)

    (few, short), (many, long) = map(smallest, ROWS)
    return ExchangeCost(short, max(long - short, 0.0) / (many - few))
