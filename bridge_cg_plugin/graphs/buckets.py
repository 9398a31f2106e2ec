"""Buckets, the one that a batch goes into, and which is worth recording next, by what recent microbatches looked like.

Imports no torch.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from .errors import Retry
from .fallback import Fallback

# Attention and GEMM kernels work on tiles of this many tokens; finer capacities save nothing.
GRANULARITY = 64
# Up to here matrix libraries choose kernels by the number of rows, so padding would change eager's rounding.
EXACT_BELOW = 256


class Bucket(NamedTuple):
    """What one recording of a region is made for. Every replay looks it up several times: a tuple, hashed in C.

    Attributes:
        tokens: Capacity.
        limits: Further upper bounds that the program gave the recording; the engine does not interpret them.
    """

    tokens: int
    limits: tuple[int, ...] = ()

    def contains(self, other: "Bucket") -> bool:
        """Whether both have the same capacity and every limit here is at least the other's."""
        return self.tokens == other.tokens and all(a >= b for a, b in zip(self.limits, other.limits, strict=True))

    def __str__(self) -> str:
        return "/".join(map(str, (self.tokens, *self.limits)))


def raised(limit: int, needed: int) -> int:
    """Return a limit, doubled until it is at least what is needed."""
    while limit < needed:
        limit *= 2
    return limit


def names_of(capacities: Sequence[int]) -> str:
    """Return the buckets of some capacities in words."""
    return f"buckets {', '.join(map(str, capacities))} tokens" if capacities else "no bucket yet"


def next_run(capacities: Sequence[int], field: str) -> str:
    """Return how another run captures buckets of these capacities after its warm-up steps, and no others."""
    return f"{field}=[{','.join(map(str, capacities))}] captures these sizes after the warm-up steps"


def choose(tokens: int, buckets: Iterable[Bucket], refuse: Callable[[Bucket], Fallback | None]) -> Bucket | Fallback:
    """Return the first bucket that accepts a batch, or the reason why none does.

    Args:
        tokens: The batch's size.
        buckets: In the order in which they are tried.
        refuse: Returns why the batch may not use a bucket that has room for its tokens, or None if it may.
    """
    reason = Fallback.TOO_MANY_TOKENS
    for bucket in buckets:
        if tokens <= bucket.tokens:
            refusal = refuse(bucket)
            if refusal is None:
                return bucket
            reason = refusal
    return reason


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of a step that is no less than a value."""
    return -(-value // step) * step


# Microbatches that a choice rests on.
WINDOW = 256
# Costs are in tokens that replays of an encoder of so many weights compute in the same time: 27 layers on an H200,
# docs/benchmarks/vision_bench.jsonl. Eager takes this many times a replay's, and at least as long as the host takes to
# launch its kernels.
WEIGHTS = 411e6
EAGER_FACTOR, EAGER_LEAST = 2.5, 5000.0
# A recording takes about half a second. It has to save as much within this many microbatches: less padding within so
# many times those that the choice rests on, since few of them say little of what is to come.
RECORDING, HORIZON, TIMES = 65_000.0, 4096, 12
# Larger models take longer for a token, so a recording and the host cost fewer of them: at most by this factor, since a
# recording computes a few passes itself. 0.75 s are 18,000 tokens of an 8B model over two H200.
MOST_WEIGHT = 4.0
# Neighbours among the capacities for sizes that come seldom; sizes that come often get one of their own.
LADDER, OFTEN = 1.125, 3
# Buckets that are recorded right after warm-up; each later step adds one at most.
BEGIN_WITH = 3
# Steps between two looks at what is padded, while nothing is worth recording: doubled each time, up to this.
LONGEST_WAIT = 64
# Steps after which buckets that could not be recorded are first tried again.
TRIED_AGAIN = 64
# Returns why a shape may not use a bucket that has room for its tokens, or None if it may.
Refuse = Callable[[Any, Bucket], Fallback | None]


class _Lately:
    """The last microbatches of one mode, and when to look at them again."""

    def __init__(self) -> None:
        self.seen: deque[Hashable] = deque(maxlen=WINDOW)
        self.missed = False
        self.wait = self.waited = 0


class Demand:
    """What a module's microbatches asked for lately, those of training and those without a backward apart.

    Ranks that see the same microbatches choose alike: only these count, no times.

    Args:
        buckets_of: Returns the buckets of a capacity, cheapest first, with limits for these shapes.
        refusal: Returns why a shape may not use a bucket that has room for its tokens, or None if it may.
        cost: Returns what a replay of a bucket takes, in tokens.
        unit: Capacities are multiples of it.
        exact_below: Shapes of up to this many tokens must fill a bucket exactly.
        named: Capacities that the user named, ascending; empty where all may be recorded.
        weights: How many weights of this rank a token is multiplied with.
        limit: The most tokens that a bucket may have.
        most: How many buckets there may be.

    Attributes:
        buckets: What is recorded.
        evaluated: What is recorded for passes without a backward alone.
        cost: See above.
    """

    def __init__(
        self,
        buckets_of: Callable[[int, Sequence[Any]], Sequence[Bucket]],
        refusal: Refuse,
        cost: Callable[[Bucket], float],
        *,
        unit: int = 1,
        exact_below: float = 0,
        named: tuple[int, ...] = (),
        weights: float = WEIGHTS,
        limit: float = math.inf,
        most: float = math.inf,
    ) -> None:
        self._most = most
        self._buckets_of, self._refusal, self.cost = buckets_of, refusal, cost
        self._unit, self._exact_below, self._named, self._limit = unit, exact_below, named, limit
        # How much longer a token takes than costs assume.
        self._weight = min(max(weights / WEIGHTS, 1.0), MOST_WEIGHT)
        # The least tokens that memory was not enough for.
        self._too_many, self._failed_for = math.inf, Fallback.CAPTURE_FAILED
        self.buckets: list[Bucket] = []
        self.evaluated: list[Bucket] = []
        self._refused: dict[Bucket, Fallback] = {}
        self._retry = Retry(TRIED_AGAIN)
        self._modes = {training: _Lately() for training in (False, True)}
        self.turn_to(training=True)

    @property
    def capacities(self) -> tuple[int, ...]:
        """Tokens of the buckets, ascending."""
        return tuple(sorted({bucket.tokens for bucket in self.buckets}))

    def turn_to(self, training: bool) -> None:
        """Note whether microbatches train from now on; buckets are chosen for those of the same mode."""
        self._lately = self._modes[training]
        # Called for every microbatch with its shape, which has `tokens`: no line of Python.
        self.saw = self._lately.seen.append

    def missed(self, shape: Any) -> Fallback:
        """Note a shape that no recording takes; returns why: a bucket that does comes later, or why none will."""
        if len(self.buckets) >= self._most:
            return self._refusal(shape, self.buckets[0]) or Fallback.TOO_MANY_TOKENS
        failed = self._failed_for if shape.tokens >= self._too_many else None
        reason = Fallback.TOO_MANY_TOKENS
        for bucket in self._candidates({shape: 1}):
            refusal = self._refusal(shape, bucket)
            if refusal is None and not self.refuses(bucket):
                self._lately.missed = True
                return Fallback.NOT_CAPTURED_YET
            if refusal is None:
                failed = failed or self._refused.get(bucket, self._failed_for)
            reason = refusal or reason
        return failed or reason

    def refuse(self, bucket: Bucket, reason: Fallback = Fallback.CAPTURE_FAILED) -> None:
        """Note why a bucket cannot be recorded now, nor a larger one where it would be the largest."""
        self._refused[bucket] = reason
        self._retry.failed()
        self.drop(bucket)  # other ranks may have recorded it
        if bucket.tokens > max((each.tokens for each in self.buckets), default=0):
            self._too_many, self._failed_for = bucket.tokens, reason

    def refuses(self, bucket: Bucket) -> bool:
        """Whether a bucket could not be recorded, or memory was not enough for less."""
        return bucket in self._refused or bucket.tokens >= self._too_many

    def begin(self, count: int) -> list[Bucket]:
        """Return the buckets to begin with: the most useful of what was seen, the largest among them first.

        Args:
            count: Buckets at most.
        """
        while len(self.buckets) < count and (bucket := self.next()) is not None:
            self.buckets.append(bucket)
        return self.buckets

    def add(self, bucket: Bucket, training: bool) -> None:
        """Note that a bucket is recorded, for passes without a backward alone where it is not for training."""
        self.drop(bucket)
        (self.buckets if training else self.evaluated).append(bucket)

    def drop(self, bucket: Bucket) -> None:
        """Note that a bucket is not recorded any more; it may be again."""
        self.buckets, self.evaluated = ([b for b in held if b != bucket] for held in (self.buckets, self.evaluated))

    @property
    def _usable(self) -> list[Bucket]:
        """What microbatches of the mode can use now."""
        return self.buckets if self._lately is self._modes[True] else [*self.buckets, *self.evaluated]

    def due(self) -> bool:
        """Whether it is time to look; called once a step."""
        self._retry.turn()
        if self._refused and self._retry.due:
            self._too_many, self._refused = math.inf, {}
        lately = self._lately
        lately.waited += 1
        return lately.missed or lately.waited > lately.wait

    def next(self) -> Bucket | None:
        """Return the bucket that saves most if the microbatches seen come again, None where none saves its price."""
        lately = self._lately
        lately.missed, lately.waited = False, 0
        if len(self.buckets) >= self._most:
            return None
        shapes: Counter[Any] = Counter(lately.seen)
        replayed = {shape: self._replayed(shape) for shape in shapes}
        often = HORIZON / max(len(lately.seen), 1)
        best, most = None, RECORDING / self._weight
        for bucket in self._candidates(shapes):
            if bucket in self._usable or self.refuses(bucket):
                continue
            cost, saved = self.cost(bucket), 0.0
            for shape, count in shapes.items():
                replay = replayed[shape]
                price, times = (self._eager_cost(shape), often) if replay is None else (replay, TIMES)
                if price > cost and self.accepts(shape, bucket):
                    saved += count * times * (price - cost)
            if saved > most:
                best, most = bucket, saved
        lately.wait = min(max(2 * lately.wait, 1), LONGEST_WAIT) if best is None else 0
        return best

    def _eager_cost(self, shape: Any) -> float:
        """Return what a shape takes eager, in tokens."""
        return max(EAGER_FACTOR * float(shape.tokens), EAGER_LEAST / self._weight)

    def accepts(self, shape: Any, bucket: Bucket) -> bool:
        """Whether a shape may use a bucket."""
        return shape.tokens <= bucket.tokens and self._refusal(shape, bucket) is None

    def _capacities_for(self, tokens: int, often: bool) -> list[int]:
        """Return the capacities to consider for a size.

        Args:
            tokens: The size.
            often: Whether it comes often enough for a capacity of its own.
        """
        if self._named:
            return [next((c for c in self._named if c >= tokens), 0)]
        if tokens <= self._exact_below:
            return [tokens]
        step = math.lcm(GRANULARITY, self._unit)
        rung = math.ceil(math.log(max(tokens / step, 1.0)) / math.log(LADDER) - 1e-9)
        found = [round_up(math.ceil(step * LADDER**rung), step)]
        return [round_up(tokens, step), *found] if often else found

    def _replayed(self, shape: Any) -> float | None:
        """Return what a shape's cheapest replay costs; None where it runs eager."""
        costs = [self.cost(bucket) for bucket in self._usable if self.accepts(shape, bucket)]
        return min(costs, default=None)

    def _candidates(self, shapes: dict[Any, int]) -> list[Bucket]:
        sizes: Counter[int] = Counter()
        for shape, count in shapes.items():
            sizes[shape.tokens] += count
        found = {
            self._within_limit(capacity, size)
            for size, count in sizes.items()
            if size <= self._limit and size < self._too_many
            for capacity in self._capacities_for(size, count >= OFTEN)
        }
        fitting = {c: [shape for shape in shapes if shape.tokens <= c] for c in sorted(found) if c > 0}
        return [bucket for c, those in fitting.items() for bucket in self._buckets_of(c, those)]

    def _within_limit(self, capacity: int, size: int) -> int:
        """Return a capacity, or the largest one within the limit if that takes the size as well; else 0."""
        if capacity <= self._limit:
            return capacity
        largest = 0 if self._named else int(self._limit) // self._unit * self._unit
        return largest if size <= largest else 0
