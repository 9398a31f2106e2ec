"""Choosing bounds and buckets for packs by padding, and by what packs cost that run eager."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from bridge_cg_plugin.attention_bounds import frame_limits
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.planning.buckets import EXACT_BELOW, GRANULARITY, Bucket, choose, round_up
from bridge_cg_plugin.language.packed.fit import pack_buckets, refuse_pack
from bridge_cg_plugin.options.packed import RankLayout
from bridge_cg_plugin.recipes import GPUS
from bridge_cg_plugin.vision.fit import Shape, refuse_images

from .documents import QWEN3_VL, Image, Pack, PlanError, Processor
from .records import Costs

# Neighbors differ by at most this factor, which bounds the padding of sizes that were not shown.
LARGEST_STEP = 1.25


def plan_buckets(
    sizes: Sequence[int], *, merge_unit: int = 4, max_buckets: int = 12, exact_below: int = 0
) -> tuple[int, ...]:
    """Return capacities with the least padding for some sizes and a bounded one for sizes between them, ascending.

    Args:
        sizes: Token counts of microbatches, at least one.
        merge_unit: Capacities are multiples of this.
        max_buckets: Most buckets chosen for these sizes.
        exact_below: Sizes up to this get a capacity of exactly their size, as nothing else may hold them.
    """
    step = math.lcm(GRANULARITY, merge_unit)
    padded = [size for size in sizes if size > exact_below]
    candidates = sorted({round_up(size, step) for size in padded} | {round_up(max(sizes), step)})
    chosen = _least_padding(candidates, padded, max_buckets)
    return tuple(sorted({size for size in sizes if size <= exact_below} | set(_fill_gaps(chosen, step))))


def _least_padding(candidates: Sequence[int], sizes: Sequence[int], count: int) -> list[int]:
    """Pick at most `count` candidates, the last among them, so that padding each size up costs least."""
    if len(candidates) <= count:
        return list(candidates)
    ordered = sorted(sizes)
    below = [sum(size <= c for size in ordered) for c in candidates]
    # cost[j]: padded tokens of all sizes up to candidate j when j is the last bucket, for the current bucket count.
    cost = [below[j] * candidates[j] for j in range(len(candidates))]
    choice = [[-1] * len(candidates)]
    for _ in range(count - 1):
        longer, previous = list(cost), [-1] * len(candidates)
        for j in range(len(candidates)):
            for i in range(j):
                value = cost[i] + (below[j] - below[i]) * candidates[j]
                if value < longer[j]:
                    longer[j], previous[j] = value, i
        cost = longer
        choice.append(previous)
    picked, j = [], len(candidates) - 1
    for previous in reversed(choice):
        if j < 0:
            break
        if previous[j] >= 0:
            picked.append(candidates[j])
            j = previous[j]
    picked.append(candidates[j])
    return sorted(set(picked) | {candidates[-1]})


def _fill_gaps(capacities: Sequence[int], step: int) -> list[int]:
    """Add capacities between neighbours that differ by more than `LARGEST_STEP`."""
    filled = [capacities[0]]
    for capacity in capacities[1:]:
        gaps = math.ceil(math.log(capacity / filled[-1]) / math.log(LARGEST_STEP))
        ratio, start = (capacity / filled[-1]) ** (1 / max(gaps, 1)), filled[-1]
        for i in range(1, gaps):
            between = round_up(math.ceil(start * ratio**i), step)
            if filled[-1] < between < capacity:
                filled.append(between)
        filled.append(capacity)
    return filled


ALONE = RankLayout()
MAX_BUCKETS = 12
# Capacities are multiples of this, and of what ranks ask for.
MERGE_UNIT = 4
BUCKET_COUNTS = (1, 2, 4, 8, MAX_BUCKETS)
SHARES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
# A further document bound, or bucket, must save this part of the cost.
WORTH = 0.001


@dataclass(frozen=True, slots=True)
class Percentiles:
    """P50, P90, P99 and the largest of some sizes."""

    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True)
class Expected:
    """What to expect of microbatches.

    Attributes:
        cost: Mean cost of one, in tokens, where eager costs as little as measured.
        ratios: Their time over eager: least and greatest, as measured ratios have it.
        on_graphs: Share that replays.
        padding: Padding tokens over all tokens replayed.
        fallbacks: How many run eager, by reason.
    """

    cost: float
    ratios: tuple[float, float]
    on_graphs: float
    padding: float
    fallbacks: tuple[tuple[Fallback, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to set the options, and what to expect of it.

    Attributes:
        max_packed_seqs: Documents of one pack that a graph takes.
        buckets: Capacities in tokens.
        expected: Of the packs.
        memory_gb: GiB of one slot; None where no record has it.
    """

    max_packed_seqs: int
    buckets: tuple[int, ...]
    expected: Expected
    memory_gb: float | None


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """What packs of a dataset look like, and what to set.

    Attributes:
        packs: How many packs it rests on.
        documents: Documents of a pack.
        tokens: Tokens of a pack.
        longest: Tokens of the longest document of a pack.
        choices: Every bound that was looked at, with its best buckets, ascending.
        best: The recommended one.
        origin: Which records the ratios are of.
        layout: How ranks share packs.
    """

    packs: int
    documents: Percentiles
    tokens: Percentiles
    longest: Percentiles
    choices: tuple[Choice, ...]
    best: Choice
    origin: str
    layout: str = str(RankLayout())


def percentiles(values: Iterable[int]) -> Percentiles:
    """Return the percentiles of at least one value: the smallest that so many parts of them do not exceed."""
    ordered = sorted(values)
    return Percentiles(*(ordered[_rank(share, len(ordered))] for share in (0.5, 0.9, 0.99, 1.0)))


def _rank(share: float, count: int) -> int:
    return max(math.ceil(share * count) - 1, 0)


def plan_packs(
    packs: Sequence[Pack], costs: Costs, max_memory_gb: float | None = None, layout: RankLayout = ALONE
) -> PackedPlan:
    """Find the document bound and the buckets with the least expected cost.

    Args:
        packs: Document lengths of every pack.
        costs: What microbatches cost.
        max_memory_gb: Limit of one slot's memory; None is no limit.
        layout: How ranks share packs, whose lengths are multiples of what it asks for.

    Raises:
        PlanError: There is no pack, or no choice fits the memory.
    """
    if not packs:
        raise PlanError("Cannot plan without packs: the data holds fewer documents than one microbatch takes.")
    counts, alike = sorted(len(pack) for pack in packs), Counter(packs)
    powers = (1 << n for n in range(2, counts[-1].bit_length() + 1))
    bounds = {counts[_rank(share, len(counts))] for share in SHARES} | {n for n in powers if n <= 2 * counts[-1]}
    capacities = _bucket_sets([sum(pack) for pack in packs], layout)
    choices = []
    for bound in sorted(bounds):
        found = [expect(alike, costs, bound, buckets, layout) for buckets in capacities]
        if found := [choice for choice in found if _fits(choice.memory_gb, max_memory_gb)]:
            choices.append(_cheapest(sorted(found, key=lambda c: len(c.buckets))))
    if not choices:
        raise _too_little(costs, max_memory_gb, min(b[-1] for b in capacities), "packs")
    return PackedPlan(
        packs=len(packs),
        documents=percentiles(counts),
        tokens=percentiles(sum(pack) for pack in packs),
        longest=percentiles(max(pack) for pack in packs),
        choices=tuple(choices),
        best=_cheapest(choices),
        origin=costs.origin,
        layout=str(layout),
    )


def expect(
    packs: Counter[Pack], costs: Costs, bound: int, buckets: tuple[int, ...], layout: RankLayout = ALONE
) -> Choice:
    """Return what a document bound and buckets give: each pack takes the first bucket and bound that accepts it."""
    recorded = pack_buckets(buckets, bound)
    found = expected(packs, costs, lambda pack: place(pack, recorded, layout))
    return Choice(bound, buckets, found, costs.memory_gb(buckets[-1]))


def expected(batches: Counter[Pack], costs: Costs, placed: Callable[[Pack], Bucket | Fallback]) -> Expected:
    """Return what to expect of microbatches.

    Args:
        batches: Lengths of the segments of each, and how many are alike.
        costs: What they cost.
        placed: Tells the bucket that takes one, or why none does.
    """
    replayed = real = padded = 0
    eager, left = [0.0, 0.0], [0.0, 0.0]  # by the greatest and by the least ratio: of all, of those that run eager
    fallbacks: Counter[Fallback] = Counter()
    for batch, count in batches.items():
        tokens, found = sum(batch), placed(batch)
        cost = [count * each for each in costs.eager(tokens)]
        eager = [total + each for total, each in zip(eager, cost, strict=True)]
        if isinstance(found, Fallback):
            fallbacks[found] += count
            left = [total + each for total, each in zip(left, cost, strict=True)]
        else:
            replayed, real, padded = replayed + count, real + count * tokens, padded + count * found.tokens
    ratios = sorted((padded + part) / whole for part, whole in zip(left, eager, strict=True))
    return Expected(
        cost=(padded + left[0]) / batches.total(),
        ratios=(ratios[0], ratios[1]),
        on_graphs=replayed / batches.total(),
        padding=1 - real / padded if padded else 0.0,
        fallbacks=tuple(sorted(fallbacks.items())),
    )


def place(pack: Pack, buckets: Sequence[Bucket], layout: RankLayout = ALONE) -> Bucket | Fallback:
    """Return the first bucket that takes a pack, or why none does."""
    tokens = sum(pack)
    refuse = partial(refuse_pack, pack, tokens, EXACT_BELOW, shards=layout.shards, ranks=layout.context)
    return choose(tokens, buckets, refuse)


def _bucket_sets(tokens: Sequence[int], layout: RankLayout) -> list[tuple[int, ...]]:
    """Return bucket lists from few to many, up to what automatic planning would make."""
    if layout.shards > 1:  # packs cannot be padded: the sizes that come most often
        usual = [size for size, _ in Counter(tokens).most_common(MAX_BUCKETS)]
        return list(dict.fromkeys(tuple(sorted(usual[:count])) for count in BUCKET_COUNTS))
    exact_below = EXACT_BELOW * layout.context
    plans = (
        plan_buckets(tokens, merge_unit=max(layout.unit, MERGE_UNIT), max_buckets=n, exact_below=exact_below)
        for n in BUCKET_COUNTS
    )
    return list(dict.fromkeys(plans))


def _fits(memory_gb: float | None, limit: float | None) -> bool:
    """Whether a slot keeps within a limit, in GiB. What is not known does not."""
    return limit is None or (memory_gb is not None and memory_gb <= limit)


def _too_little(costs: Costs, limit: float | None, smallest: int, what: str) -> PlanError:
    """Return the refusal of a limit of memory that nothing keeps within.

    Args:
        costs: Tell the memory, if it is known.
        limit: In GiB.
        smallest: Tokens of the smallest largest bucket.
        what: What has these tokens.
    """
    memory = costs.memory_gb(smallest)
    if memory is None:
        return PlanError(f"Cannot use --max-memory-gb {limit:g}: no record has the memory of this model. Remove it.")
    least = math.ceil(memory * 10) / 10
    return PlanError(
        f"Cannot use --max-memory-gb {limit:g}: it must be at least {least}, for a graph of the largest {what}."
    )


def _cheapest(choices: Sequence[Choice]) -> Choice:
    """Return the cheapest; of those that cost all but as little, the first."""
    least = min(choice.expected.cost for choice in choices)
    return next(choice for choice in choices if choice.expected.cost <= least * (1 + WORTH))


@dataclass(frozen=True, slots=True)
class VisionPlan:
    """What microbatches of a dataset's images look like, and what to set.

    Attributes:
        microbatches: How many it rests on.
        tokens: Patches of a microbatch.
        frames: Attention segments of a microbatch.
        largest: Patches of its largest frame.
        buckets: The recommended capacities.
        max_frames: The recommended bound.
        expected: Of the microbatches.
        memory_gb: GiB of one slot; None where no record has it.
        origin: Which records the ratios are of.
        gpu: Whose limit of a bucket holds; None is no limit.
    """

    microbatches: int
    tokens: Percentiles
    frames: Percentiles
    largest: Percentiles
    buckets: tuple[int, ...]
    max_frames: int
    expected: Expected
    memory_gb: float | None
    origin: str
    gpu: str | None = None


def plan_images(
    images: Sequence[Image],
    costs: Costs,
    per_microbatch: int = 1,
    processor: Processor = QWEN3_VL,
    max_memory_gb: float | None = None,
    seed: int = 0,
    gpu: str | None = None,
) -> VisionPlan:
    """Find the buckets with the least expected cost.

    Args:
        images: The dataset's.
        costs: What microbatches cost.
        per_microbatch: Images of a microbatch, drawn in random order.
        processor: Of the model.
        max_memory_gb: Limit of one slot's memory; None is no limit.
        seed: Of the order.
        gpu: A key of `recipes.GPUS`, whose limit of a bucket holds; None is no limit.

    Raises:
        PlanError: There are fewer images than a microbatch takes, or no buckets fit the memory or the GPU.
    """
    if not 1 <= per_microbatch <= len(images):
        raise PlanError(
            f"Cannot use --images-per-microbatch {per_microbatch}: it must be 1 to the dataset's {len(images)}."
        )
    order = random.Random(seed).sample(images, len(images))
    batches = [
        tuple(n for image in order[i : i + per_microbatch] for n in image.segments(processor))
        for i in range(0, len(order) - per_microbatch + 1, per_microbatch)
    ]
    frames = percentiles(len(batch) for batch in batches)
    sizes = [sum(batch) for batch in batches]
    bound = max(64, -(-frames.max // 16) * 16)
    taken = _within(sizes, gpu)
    plans = [plan_buckets(taken, max_buckets=count, exact_below=EXACT_BELOW) for count in BUCKET_COUNTS]
    if len(set(taken)) <= max(BUCKET_COUNTS):
        plans.append(tuple(sorted(set(taken))))
    fitting = [buckets for buckets in plans if _fits(costs.memory_gb(buckets[-1]), max_memory_gb)]
    if not fitting:
        raise _too_little(costs, max_memory_gb, min(buckets[-1] for buckets in plans), "microbatch")
    alike = Counter(batches)
    choices = [(_expect(alike, costs, bound, buckets), buckets) for buckets in fitting]
    best, buckets = min(choices, key=lambda choice: (choice[0].cost, len(choice[1])))
    return VisionPlan(
        microbatches=len(batches),
        tokens=percentiles(sizes),
        frames=frames,
        largest=percentiles(max(batch) for batch in batches),
        buckets=buckets,
        max_frames=bound,
        expected=best,
        memory_gb=costs.memory_gb(buckets[-1]),
        origin=costs.origin,
        gpu=gpu,
    )


def _within(sizes: Sequence[int], gpu: str | None) -> list[int]:
    """Return the sizes for which a GPU has room.

    Raises:
        PlanError: It has room for none.
    """
    found = [size for size in sizes if gpu is None or size <= GPUS[gpu]]
    if not found and gpu is not None:
        raise PlanError(
            f"Cannot use --gpu {gpu}: its largest bucket has {GPUS[gpu]} patches, and a microbatch has at least "
            f"{min(sizes)}. Lower --images-per-microbatch or --max-pixels."
        )
    return found


def _expect(batches: Counter[tuple[int, ...]], costs: Costs, bound: int, buckets: tuple[int, ...]) -> Expected:
    recorded = [Bucket(capacity, limits) for capacity in buckets for limits in frame_limits(capacity, bound)]

    def placed(batch: tuple[int, ...]) -> Bucket | Fallback:
        shape = Shape(sum(batch), len(batch), max(batch))
        return choose(shape.tokens, recorded, partial(refuse_images, shape, EXACT_BELOW))

    return expected(batches, costs, placed)
