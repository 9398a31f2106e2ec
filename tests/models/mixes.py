"""Mixes of images, clips or tiles that encoders are compared on: drawn from a seed, of all sizes up to a largest."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from tests.models.workloads import Grid, Row

# Buckets, each twice the one before, and the smallest mix's share of the largest.
BUCKETS, SMALLEST_MIX = 5, 1 / 16
MOST_IMAGES = 48
# Patches along an image's side are even, as towers merge 2 x 2 of them.
SIDES = range(2, 33)
CLIP_FRAMES = 3000


class Mixes(Protocol):
    """What an encoder's mixes are."""

    def capacities(self, model: nn.Module, most: int) -> tuple[int, ...]:
        """Return the buckets, of at most so many tokens."""

    def draw(self, model: nn.Module, rng: random.Random, most: int) -> Any:
        """Return a size that the encoder's `make_batch` takes, of at most so many tokens."""


def target(rng: random.Random, most: int) -> int:
    """Draw a number of tokens: small ones are as frequent as large ones."""
    return int(most * SMALLEST_MIX ** rng.random())


@dataclass(frozen=True, slots=True)
class ImageMixes:
    """Images of any size.

    Attributes:
        class_tokens: Of an image, beside its patches.
    """

    class_tokens: int = 0

    def capacities(self, model: nn.Module, most: int) -> tuple[int, ...]:
        """See `Mixes`."""
        return tuple(most >> halved for halved in reversed(range(BUCKETS)))

    def draw(self, model: nn.Module, rng: random.Random, most: int) -> Grid:
        """See `Mixes`."""
        rows: list[Row] = []
        left = target(rng, most) - self.class_tokens
        while left >= 4 * SIDES[0] ** 2 and len(rows) < MOST_IMAGES:
            rows.append(self._image(rng, left))
            left -= rows[-1][1] * rows[-1][2] + self.class_tokens
        return rows or [(1, 2, 2)]

    @staticmethod
    def _image(rng: random.Random, most: int) -> Row:
        height = 2 * rng.randint(SIDES[0], min(SIDES[-1], max(math.isqrt(most) // 2, SIDES[0])))
        width = 2 * rng.randint(SIDES[0], min(SIDES[-1], max(most // height // 2, SIDES[0])))
        return 1, height, width


@dataclass(frozen=True, slots=True)
class ClipMixes:
    """Clips of any length.

    Attributes:
        frames: Of a chunk.
        room: Returns what a chunk counts in a model.
    """

    frames: int
    room: Callable[[nn.Module], int]

    def capacities(self, model: nn.Module, most: int) -> tuple[int, ...]:
        """See `Mixes`."""
        return tuple(most >> halved for halved in reversed(range(BUCKETS)))

    def draw(self, model: nn.Module, rng: random.Random, most: int) -> list[int]:
        """See `Mixes`. The first clip fills a chunk: graphs take no others where all are shorter."""
        left = max(target(rng, most) // self.room(model), 1)
        clips = [self.frames]
        while (left := left - math.ceil(clips[-1] / self.frames)) > 0 and len(clips) < MOST_IMAGES:
            clips.append(rng.randint(1, min(left * self.frames, CLIP_FRAMES)))
        return clips


@dataclass(frozen=True, slots=True)
class CountMixes:
    """Images of one size.

    Attributes:
        room: Returns what an image counts in a model.
    """

    room: Callable[[nn.Module], int]

    def capacities(self, model: nn.Module, most: int) -> tuple[int, ...]:
        """See `Mixes`."""
        room = self.room(model)
        images = most // room
        return tuple(room * count for count in sorted({max(images * part // 4, 1) for part in (1, 2, 3, 4)} | {1}))

    def draw(self, model: nn.Module, rng: random.Random, most: int) -> int:
        """See `Mixes`."""
        return rng.randint(1, most // self.room(model))
