"""Planning vision buckets from image sizes."""

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bridge_cg_plugin.attention_bounds import frame_limits
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.planning.buckets import EXACT_BELOW, Bucket, choose
from bridge_cg_plugin.recipes import GPUS
from bridge_cg_plugin.vision.fit import Shape, refuse_images

from .errors import PlanError
from .lengths import drawn, json_lines, whole_count
from .plan import BUCKET_COUNTS, Expected, Percentiles, expected, fits, percentiles, plan_buckets, too_little
from .records import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """How a model divides images into patches; by default as Qwen3-VL's processor does.

    Attributes:
        patch: Pixels of a patch's side.
        merge: Patches of the side of a square that becomes one embedding.
        temporal: Frames of a patch.
        min_pixels, max_pixels: Between which an image is resized.
    """

    patch: int = 16
    merge: int = 2
    temporal: int = 2
    min_pixels: int = 65_536
    max_pixels: int = 16_777_216

    @property
    def unit(self) -> int:
        """Pixels that both sides of an image are a multiple of."""
        return self.patch * self.merge


QWEN3_VL = Processor()


@dataclass(frozen=True, slots=True)
class Image:
    """An image or a video.

    Attributes:
        width, height: Pixels.
        frames: Frames of a video, 1 for an image.
    """

    width: int
    height: int
    frames: int = 1

    def segments(self, processor: Processor = QWEN3_VL) -> tuple[int, ...]:
        """Return the patches of every attention segment after the processor has resized it."""
        unit, patch = processor.unit, processor.patch
        width, height = (round(side / unit) * unit for side in (self.width, self.height))
        if width * height > processor.max_pixels:
            width, height = self._scaled(processor.max_pixels, unit, math.floor)
        elif width * height < processor.min_pixels:
            width, height = self._scaled(processor.min_pixels, unit, math.ceil)
        return (width // patch * (height // patch),) * math.ceil(self.frames / processor.temporal)

    def _scaled(self, pixels: int, unit: int, to_whole: Any) -> tuple[int, int]:
        factor = math.sqrt(pixels / (self.width * self.height))
        width, height = (max(to_whole(side * factor / unit), 1) * unit for side in (self.width, self.height))
        return width, height


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


def read_images(path: Path) -> list[Image]:
    """Read image sizes: a histogram `{"640x480": count}`, or JSON Lines with `width`, `height` and maybe `frames`.

    Raises:
        PlanError: The file cannot be read, or a row has no size.
    """
    if not path.exists():
        raise PlanError(f"Cannot plan from {path}: it does not exist. It must be .json or .jsonl.")
    try:
        if path.suffix.lower() == ".json":
            found = json.loads(path.read_text(encoding="utf-8-sig"))
            if not isinstance(found, dict):
                raise PlanError(f'Cannot plan from {path}: it must be a histogram {{"WIDTHxHEIGHT": count}}.')
            images = drawn([(_named(size, path), _count(count, size, path)) for size, count in found.items()])
        elif path.suffix.lower() == ".jsonl":
            images = [_image(row, f"{path}, row {number}") for number, row in enumerate(json_lines(path))]
        else:
            raise PlanError(f"Cannot plan from {path}: it must be .json or .jsonl.")
    except PlanError:
        raise
    except (OSError, ValueError) as error:
        raise PlanError(f"Cannot read {path}: {error}.") from None
    if not images:
        raise PlanError(f"Cannot plan from {path}: it has no images.")
    return images


def _named(size: str, path: Path) -> Image:
    parts = size.lower().split("x")
    if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) for part in parts):
        raise PlanError(f"Cannot plan from {path}: {size!r} must be WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES.")
    return Image(*map(int, parts))


def _count(value: Any, size: str, path: Path) -> int:
    count = whole_count(value)
    if count is None:
        raise PlanError(f"Cannot plan from {path}: {size!r}: {value!r} must be a whole number of at least 0.")
    return count


def _image(row: Any, where: str) -> Image:
    values = (
        [row.get(name, default) for name, default in (("width", None), ("height", None), ("frames", 1))]
        if (isinstance(row, dict))
        else [None]
    )
    if any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in values):
        raise PlanError(
            f"Cannot plan from {where}: {row!r} must have width, height and maybe frames, "
            "in whole numbers of at least 1."
        )
    return Image(*values)


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
    fitting = [buckets for buckets in plans if fits(costs.memory_gb(buckets[-1]), max_memory_gb)]
    if not fitting:
        raise too_little(costs, max_memory_gb, min(buckets[-1] for buckets in plans), "microbatch")
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
