"""What the benchmarks run: the cases of the tables, the sweep over tokens, and images of a measured distribution."""

import math
import random
from collections.abc import Sequence

Row = tuple[int, int, int]
Grid = Sequence[Row]

CASES: dict[str, Grid] = {
    "1x448": [(1, 28, 28)],
    "1x768": [(1, 48, 48)],
    "4x448": [(1, 28, 28)] * 4,
    "8mix": [(1, h, w) for h, w in ((16, 24), (28, 28), (32, 20), (48, 48), (12, 12), (40, 30), (24, 36), (20, 20))],
    "video16": [(16, 20, 20)],
    "1x2048": [(1, 128, 128)],
}

# Qwen3-VL's processor: patches of 16 pixels, 2 x 2 of them merged, so sides are multiples of 32 pixels.
PATCH = 16
SIDE = 32

# COCO's training images. 90 % have 167,500 to 355,840 pixels, and 90 % a ratio of height to width from 0.6 to 1.5:
# https://github.com/Lextal/SotA-CV/blob/HEAD/content/datasets/coco_detection.md. No side is above 640 pixels.
COCO_PIXELS = (167_500, 355_840)
COCO_RATIOS = (0.6, 1.5)
COCO_LONGEST = 640
# 90 % of a normal distribution lie within this many standard deviations.
WITHIN_90 = 1.645


def tokens_of(grid: Grid) -> int:
    """Return the patches of a grid."""
    return sum(t * h * w for t, h, w in grid)


def frames_of(grid: Grid) -> int:
    """Return the images and video frames of a grid."""
    return sum(t for t, _, _ in grid)


def one_image(tokens: int) -> Grid:
    """Return one image of so many patches, a multiple of 4, as square as two even sides allow."""
    height = max(side for side in range(2, math.isqrt(tokens) + 1, 2) if tokens % (2 * side) == 0)
    return [(1, height, tokens // height)]


def coco_image(rng: random.Random) -> Row:
    """Draw an image's grid as Qwen3-VL's processor makes it from an image of COCO's sizes.

    Pixels and the ratio of height to width are log-normal, independent, with the published 90 % between their 5 % and
    95 % quantiles. The longer side is cut to 640 pixels, then both sides are rounded to multiples of 32.
    """
    pixels = _log_normal(rng, *COCO_PIXELS)
    ratio = _log_normal(rng, *COCO_RATIOS)
    height, width = math.sqrt(pixels * ratio), math.sqrt(pixels / ratio)
    scale = min(COCO_LONGEST / max(height, width), 1.0)
    return 1, _patches(height * scale), _patches(width * scale)


def coco_microbatches(count: int, most: int = 4, seed: int = 1) -> list[Grid]:
    """Draw microbatches of 1 to `most` images each; the same seed gives the same ones."""
    rng = random.Random(seed)
    return [[coco_image(rng) for _ in range(rng.randint(1, most))] for _ in range(count)]


def _log_normal(rng: random.Random, low: float, high: float) -> float:
    middle, half = math.log(low * high) / 2, math.log(high / low) / 2
    return math.exp(rng.gauss(middle, half / WITHIN_90))


def _patches(pixels: float) -> int:
    return max(round(pixels / SIDE), 1) * SIDE // PATCH
