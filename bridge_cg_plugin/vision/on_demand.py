"""What may be recorded of an encoder while training runs, and what asks for it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..attention_bounds import replay_cost
from ..graphs.fallback import Fallback
from ..graphs.piece import Growth
from ..graphs.planning.buckets import Bucket, any_size
from ..graphs.planning.demand import Demand, Menu
from ..graphs.program import RegionProgram
from ..options import VisionGraphOptions
from .adapter import EncoderBatch, LayerPart
from .plan import EncoderPlan
from .shape import Shape


def menu_of(
    options: VisionGraphOptions,
    unit: int,
    program: RegionProgram,
    buckets_of: Callable[[int, Sequence[Shape]], Sequence[Bucket]],
    last_alike: Callable[[int, int], int] = any_size,
) -> Menu:
    """Return what may be recorded of an encoder.

    Args:
        options: What the user asked for.
        unit: Capacities are multiples of it.
        program: The whole encoder.
        buckets_of: See `Menu`; of parts of layers, see `buckets_of_parts`.
        last_alike: See `Menu`.
    """
    return Menu(
        buckets_of=buckets_of,
        refuse=program.refuse if options.whole_encoder else partial(_refuse_part, options.exact_below),
        cost=replay_cost,
        unit=unit,
        exact_below=options.exact_below,
        capacities=() if options.buckets == "auto" else options.buckets,
        last_alike=last_alike,
    )


def buckets_of_parts(
    plan: EncoderPlan, parts: Sequence[LayerPart], capacity: int, shapes: Sequence[Shape]
) -> list[Bucket]:
    """Return the bucket of a capacity that stands for those of all parts, with the limit (frames,) if any sees frames.

    Args:
        plan: The encoder's.
        parts: Of every layer.
        capacity: Tokens.
        shapes: Microbatches that it is for.
    """
    frames = plan.max_frames(shapes)
    return [Bucket(capacity, (frames,) if any(part.limits(frames) for part in parts) else ())]


def growth_of(demand: Demand) -> Growth:
    """Return how the whole encoder's region gets buckets."""
    return Growth(replay_cost, partial(_missed, demand))


def growth_of_part(demand: Demand, part: LayerPart) -> Growth:
    """Return how the region of a part of a layer gets buckets, with limits of its own."""
    bucket_of = partial(_of_part, part)
    return Growth(replay_cost, partial(_part_missed, demand, part.program, bucket_of), bucket_of)


def _missed(demand: Demand, batch: EncoderBatch) -> Fallback:
    return demand.missed(batch.shape)


def _part_missed(demand: Demand, program: RegionProgram, bucket_of: Callable[[Bucket], Bucket], batch: Any) -> Fallback:
    tokens = program.size(batch)
    return demand.missed(
        Shape(tokens, batch.segments, tokens), lambda _, bucket: program.refuse(batch, bucket_of(bucket))
    )


def _of_part(part: LayerPart, bucket: Bucket) -> Bucket:
    return Bucket(bucket.tokens, part.limits(*bucket.limits) if bucket.limits else ())


def _refuse_part(exact_below: int, shape: Shape, bucket: Bucket) -> Fallback | None:
    """Return why parts of layers do not take a shape, or None if they do."""
    if bucket.limits and shape.frames > bucket.limits[0]:
        return Fallback.TOO_MANY_FRAMES
    return Fallback.TOO_FEW_TOKENS if shape.tokens <= exact_below and shape.tokens != bucket.tokens else None
