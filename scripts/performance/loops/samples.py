"""Samples of reinforcement learning with images: prompts with 1 to 3 images and responses, drawn at random.

Samples come in pairs with as many patches in both, of three totals, however many images they have. A microbatch of a
pair thus fills a bucket, so that eager and graphs compute the same rows.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Grid = tuple[int, int, int]

VISION_START, VISION_END, IMAGE = 151_652, 151_653, 151_655
WORDS = 100_000  # ids of text
PIXELS_OF_PATCH = 3 * 2 * 16 * 16
MERGED = 4  # patches of one embedding
# Patches of sizes that photographs of the main job have.
SMALL, SQUARE, TALL, WIDE = (1, 20, 32), (1, 28, 28), (1, 40, 30), (1, 32, 42)
# Images of a sample, by its patches.
MIXES: dict[int, tuple[tuple[Grid, ...], ...]] = {
    1344: ((WIDE,),),
    1984: ((SMALL, WIDE), (SQUARE, TALL)),
    2624: ((SMALL, SMALL, WIDE), (SMALL, SQUARE, TALL)),
}
PAIR = 2
# Microbatches of a round, in turns.
MICROBATCHES = (3, 5, 4)
SHORTEST, LONGEST = 24, 160  # tokens of a response; of a prompt's text half as many


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt with its response.

    Attributes:
        prompt: Ids, with a placeholder for every embedding of an image.
        response: Ids.
        grids: Frames, rows and columns of patches of every image.
        seed: Of its pixels.
        advantage: Of all tokens of its response.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    grids: tuple[Grid, ...]
    seed: int
    advantage: float

    @property
    def patches(self) -> int:
        """Patches of all images."""
        return sum(frames * rows * columns for frames, rows, columns in self.grids)

    def pixels(self) -> Tensor:
        """Return `[patches, 1536]` fp32 values, the same at every call."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.patches, PIXELS_OF_PATCH, generator=generator)

    def grid_thw(self) -> Tensor:
        """Return `[images, 3]` int64 grids."""
        return torch.tensor(self.grids)


def draw_round(number: int, seed: int) -> list[Sample]:
    """Return the samples of a round, pairs of a microbatch side by side; each total is there.

    Args:
        number: Of the round, from 0; rounds have other samples and another number of microbatches.
        seed: Of all rounds.
    """
    rng = random.Random(seed * 1_000_003 + number)
    count = MICROBATCHES[number % len(MICROBATCHES)]
    totals = [*MIXES, *rng.choices(list(MIXES), k=count - len(MIXES))]
    rng.shuffle(totals)
    return [_draw(rng, MIXES[total]) for total in totals for _ in range(PAIR)]


def _draw(rng: random.Random, mixes: Sequence[tuple[Grid, ...]]) -> Sample:
    grids = rng.choice(mixes)
    prompt = _words(rng, rng.randint(SHORTEST, LONGEST) // 2)
    for frames, rows, columns in grids:
        prompt += [VISION_START, *[IMAGE] * (frames * rows * columns // MERGED), VISION_END]
    prompt += _words(rng, rng.randint(SHORTEST, LONGEST) // 2)
    response = _words(rng, rng.randint(SHORTEST, LONGEST))
    return Sample(tuple(prompt), tuple(response), grids, rng.randrange(2**31), rng.gauss(0.0, 1.0))


def _words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(WORDS) for _ in range(count)]


def microbatches(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    """Return the pairs of a round."""
    return [samples[first : first + PAIR] for first in range(0, len(samples), PAIR)]
