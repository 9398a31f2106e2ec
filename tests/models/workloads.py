"""What the benchmarks run: the cases of the tables, the sweep over tokens, and images of a measured distribution."""

import math
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
