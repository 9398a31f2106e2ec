"""What a region did: replays per bucket, padding, fallbacks with their reasons, memory, capture time."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ...announce import LOGGER, announce, rank
from ..fallback import Fallback
from ..planning.buckets import Bucket

LAST_FALLBACKS = 5
# What JSON has besides fallbacks and buckets.
FIGURES = (
    *("replays", "warmup_microbatches", "padding_share", "capture_seconds", "pause_seconds", "longest_pause"),
    *("memory_bytes", "static_bytes", "gradient_bytes", "pinned_bytes"),
)


class EagerRun(NamedTuple):
    """A microbatch that ran eager although there are graphs.

    Attributes:
        step: Number of the training step, from 1; 0 where nobody counts them.
        reason: Why it did.
        tokens: Its size; None where it is not known.
    """

    step: int
    reason: Fallback
    tokens: int | None = None

    def __str__(self) -> str:
        size = "" if self.tokens is None else f" ({self.tokens} tokens)"
        return f"step {self.step} {self.reason}{size}"


@dataclass(slots=True)
class BucketStatistics:
    """Counts of one bucket.

    Attributes:
        replays: Forward replays that a backward may follow.
        evaluations: Forward-only replays.
        tokens: Real tokens replayed, forward-only ones included.
        padding: Padding tokens.
    """

    replays: int = 0
    evaluations: int = 0
    tokens: int = 0
    padding: int = 0

    def add(self, other: "BucketStatistics") -> None:
        """Add another region's counts of the bucket."""
        for name, count in asdict(other).items():
            setattr(self, name, getattr(self, name) + count)


@dataclass(slots=True)
class RegionStatistics:
    """Counts of one region since it was made.

    Attributes:
        fallbacks: Microbatches that ran eager, by reason.
        last_fallbacks: The last of them, oldest first.
        known: Reasons that were announced; regions of one module share the set.
        step: Number of the training step under way, from 1; 0 where nobody counts them.
        capture_seconds: Time that recordings took.
        pauses: Of those after the first capture, in seconds, by the training step that waited for them; other ranks may
            have waited, too.
        graph_bytes: Device memory of graphs.
        static_bytes: Device memory of static buffers.
        gradient_bytes: Device memory of parameter gradients that are handed to autograd, of all recordings.
        pinned_bytes: Page-locked host memory of offloaded activations.
        step_tokens: Tokens of each of the last training steps, replayed or eager, oldest first; empty where nobody
            counts them.
    """

    buckets: dict[Bucket, BucketStatistics] = field(default_factory=dict)
    fallbacks: Counter[Fallback] = field(default_factory=Counter)
    last_fallbacks: deque[EagerRun] = field(default_factory=partial(deque, maxlen=LAST_FALLBACKS))
    known: set[Fallback] = field(default_factory=set)
    step: int = 0
    warmup_microbatches: int = 0
    capture_seconds: float = 0.0
    pauses: defaultdict[int, float] = field(default_factory=partial(defaultdict, float))
    graph_bytes: int = 0
    static_bytes: int = 0
    gradient_bytes: int = 0
    pinned_bytes: int = 0
    step_tokens: list[int] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count the time inside, in which something is recorded."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.capture_seconds += time.perf_counter() - started

    def replayed(self, bucket: Bucket, tokens: int, training: bool) -> None:
        """Count one replay of `tokens` real tokens."""
        counts = self.buckets[bucket]
        if training:
            counts.replays += 1
        else:
            counts.evaluations += 1
        counts.tokens += tokens
        counts.padding += bucket.tokens - tokens

    def fell_back(self, where: str, reason: Fallback, tokens: int | None = None) -> None:
        """Count a microbatch that runs eager; the first for each reason is announced, the others logged for debugging.

        Args:
            where: Name of the region or the module.
            reason: Why it does.
            tokens: Its size, if it is known.
        """
        run = EagerRun(self.step, reason, tokens)
        self.fallbacks[reason] += 1
        self.last_fallbacks.append(run)
        LOGGER.debug("[rank %d] %s runs eager: %s", rank(), where, run)
        if reason not in self.known:
            self.known.add(reason)
            announce(f"{where} runs eager, {run}: {reason.meaning}. Remedy: {reason.remedy}.".replace("`", ""))

    @property
    def replays(self) -> int:
        """All replays."""
        return sum(b.replays + b.evaluations for b in self.buckets.values())

    @property
    def pause_seconds(self) -> float:
        """Seconds that training steps waited for recordings after the first capture."""
        return float(sum(self.pauses.values()))

    @property
    def longest_pause(self) -> float:
        """The most that one training step waited for recordings, in seconds."""
        return max(self.pauses.values(), default=0.0)

    @property
    def replayed_tokens(self) -> int:
        """Real tokens of all replays."""
        return sum(bucket.tokens for bucket in self.buckets.values())

    @property
    def padding(self) -> int:
        """Padding tokens of all replays."""
        return sum(bucket.padding for bucket in self.buckets.values())

    @property
    def padding_share(self) -> float:
        """Padding tokens over all tokens replayed, 0 to 1."""
        return self.padding / max(self.padding + self.replayed_tokens, 1)

    @property
    def memory_bytes(self) -> int:
        """Device memory of graphs, static buffers and gradients."""
        return self.graph_bytes + self.static_bytes + self.gradient_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for logs and JSON."""
        return {
            "fallbacks": {reason.value: count for reason, count in self.fallbacks.items()},
            "buckets": {str(bucket): asdict(counts) for bucket, counts in sorted(self.buckets.items())},
            **{name: getattr(self, name) for name in FIGURES},
        }


# From so many recordings on, a capture takes more than a few seconds.
MANY = 4
EVERY_S = 5.0


class Progress:
    """Announces how many recordings of a capture are made, at its start and every few seconds.

    Args:
        title: What is captured.
        regions: Regions that it consists of, each with as many recordings.
        clock: Returns seconds.
    """

    def __init__(self, title: str, regions: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._title, self._regions, self._clock = title, regions, clock
        self._done = self._total = 0
        self._started = self._said = clock()

    def starts(self, recordings: int, buckets: Sequence[Bucket], slots: int) -> None:
        """Note that a region begins to record; only the first one is announced.

        Args:
            recordings: How many the region will make.
            buckets: What they are of.
            slots: How many times each.
        """
        if self._total:
            return
        self._total = recordings * self._regions
        if self._total >= MANY:
            parts = f" for each of {self._regions} parts" if self._regions > 1 else ""
            largest = f"{len(buckets)} bucket(s), the largest {max(buckets)}"
            announce(f"{self._title}: {self._total} recordings begin: {largest}; {slots} slot(s){parts}")

    def recorded(self) -> None:
        """Count one recording."""
        self._done += 1
        now = self._clock()
        if self._done < self._total and now - self._said >= EVERY_S:
            self._said = now
            announce(f"{self._title}: {self._done} of {self._total} recordings made in {now - self._started:.0f} s")
