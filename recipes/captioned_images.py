"""Images with captions that a model can learn, as Bridge datasets. Imports torch and Megatron."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from megatron.bridge.training.config import DatasetBuildContext, DatasetProvider
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from torch import Tensor
from torch.utils.data import Dataset

CAPTION_TOKENS = 32
FIRST_WORD = 1000
PATCH_SIDE = 16  # pixels
PATCH_VALUES = 3 * 2 * PATCH_SIDE**2
# A patch has the same noise so many times: drawing all of it would take as long as a step.
NOISE_REPEATS = 16
# Patches of an image that become one token of the language model.
MERGED_PATCHES = 4
# (height, width) in pixels; 448 x 448 is 784 patches. Few, as cuDNN plans attention anew for every shape that it has
# not met, which takes longer than a small run.
FEW_SIZES = ((448, 448), (256, 384), (768, 768))


@dataclass(frozen=True, slots=True)
class Images:
    """Some images, as Qwen's processors return them.

    Attributes:
        pixels: `[patches, 1536]` fp32.
        grid: `[images, 3]` int64: patches in time, height and width.
        names: What each one shows.
    """

    pixels: Tensor
    grid: Tensor
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Token ids of sequences with images.

    Attributes:
        vision_start, vision_end: Around an image.
        image: Placeholder of a merged patch.
        words: Words of captions are below.
    """

    vision_start: int
    vision_end: int
    image: int
    words: int


def caption(name: str, words: int) -> list[int]:
    """Return what is said of all images of a name: a fixed token sequence that a model can learn."""
    rng = random.Random(name)
    return [rng.randrange(FIRST_WORD, words) for _ in range(CAPTION_TOKENS)]


class CaptionedImages(Dataset[dict[str, Any]], ABC):
    """Sequences of images, each followed by its caption, padded to a fixed length.

    Args:
        samples: How many.
        sequence: Tokens of each.
        most: Most images of a sample; it has 1 or more.
        sizes: Of images, height and width in pixels.
        seed: Of what is drawn.
        text_only_every: Every how many samples one has captions and no image, 0 for none.
        distinct: After so many the samples begin again, kept in memory; 0 for never.
    """

    vocabulary: ClassVar[Vocabulary]

    def __init__(
        self,
        samples: int,
        sequence: int,
        most: int,
        sizes: Sequence[tuple[int, int]],
        seed: int,
        text_only_every: int,
        distinct: int = 0,
    ) -> None:
        self.samples, self.sequence, self.most, self.sizes = samples, sequence, most, sizes
        self.seed, self.text_only_every, self.distinct = seed, text_only_every, distinct
        self._kept: dict[int, dict[str, Any]] = {}

    @abstractmethod
    def draw(self, seed: int) -> Images:
        """Return a sample's images; the same seed gives the same ones."""

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not self.distinct:
            return self._sample(index)
        index %= self.distinct
        if index not in self._kept:
            self._kept[index] = self._sample(index)
        return self._kept[index]

    def _sample(self, index: int) -> dict[str, Any]:
        text_only = self.text_only_every and index % self.text_only_every == self.text_only_every - 1
        images = self.draw(self.seed * 1_000_003 + index)
        ids, tokens, counted = self.vocabulary, [], []
        for name, (t, h, w) in zip(images.names, images.grid.tolist(), strict=True):
            words = caption(name, ids.words)
            if not text_only:
                placeholders = [ids.vision_start, *[ids.image] * (t * h * w // MERGED_PATCHES), ids.vision_end]
                tokens += placeholders
                counted += [0] * len(placeholders)
            tokens += words
            counted += [1] * len(words)
        return self._padded(index, tokens, counted) | {"images": None if text_only else images}

    def _padded(self, index: int, tokens: list[int], counted: list[int]) -> dict[str, Tensor]:
        if len(tokens) > self.sequence + 1:
            raise ValueError(f"sample {index} has {len(tokens)} tokens, seq_length is {self.sequence}")
        padding = self.sequence + 1 - len(tokens)
        ids = torch.tensor(tokens + [0] * padding)
        mask = torch.tensor(counted + [0] * padding, dtype=torch.float)
        positions = torch.arange(self.sequence)
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask[1:], "position_ids": positions}

    def collate_fn(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Stack a microbatch; its images lie one behind the other."""
        tensors = [key for key in items[0] if key != "images"]
        batch: dict[str, Any] = {key: torch.stack([item[key] for item in items]) for key in tensors}
        images = [item["images"] for item in items if item["images"] is not None]
        batch["attention_mask"] = None
        batch["visual_inputs"] = (
            GenericVisualInputs(
                pixel_values=torch.cat([i.pixels for i in images]),
                image_grid_thw=torch.cat([i.grid for i in images]),
            )
            if images
            else None
        )
        return batch


@dataclass
class CaptionedImageProvider(DatasetProvider):
    """Bridge dataset provider over one kind of `CaptionedImages`, whose arguments the fields are."""

    kind: ClassVar[type[CaptionedImages]]

    seq_length: int = 2048
    most_images: int = 2
    sizes: list[tuple[int, int]] = field(default_factory=lambda: list(FEW_SIZES))
    seed: int = 1
    text_only_every: int = 0
    distinct: int = 0
    skip_getting_attention_mask_from_dataset: bool = True
    enable_in_batch_packing: bool = False

    def build_datasets(self, context: DatasetBuildContext) -> tuple[CaptionedImages, CaptionedImages, CaptionedImages]:
        """Build train, validation and test sets of the sizes that training asks for."""
        counts = (context.train_samples, context.valid_samples, context.test_samples)
        train, valid, test = (
            self.kind(
                max(count, 1),
                self.seq_length,
                self.most_images,
                self.sizes,
                self.seed + i,
                self.text_only_every,
                self.distinct,
            )
            for i, count in enumerate(counts)
        )
        return train, valid, test


class MockImages(CaptionedImages):
    """Noise around a pattern, one for each of a few names, so that a model can tell them apart."""

    vocabulary = Vocabulary(vision_start=8188, vision_end=8189, image=8190, words=8000)
    NAMES = ("bark", "brick", "grass", "gravel", "sand", "water")

    def draw(self, seed: int) -> Images:
        """Return 1 to `most` images, each of a name and size by chance."""
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        names = tuple(rng.choice(self.NAMES) for _ in range(rng.randint(1, self.most)))
        sizes = [rng.choice(self.sizes) for _ in names]
        grid = torch.tensor([(1, height // PATCH_SIDE, width // PATCH_SIDE) for height, width in sizes])
        pictures = []
        for name, patches in zip(names, grid.prod(-1).tolist(), strict=True):
            noise = torch.randn(patches, PATCH_VALUES // NOISE_REPEATS, generator=generator).repeat(1, NOISE_REPEATS)
            pictures.append(noise.add_(pattern(name)).div_(4).clamp_(-1, 1))
        return Images(torch.cat(pictures), grid, names)


def pattern(name: str) -> Tensor:
    """Return `[1536]` fp32, what all patches of a name's images have in common."""
    return torch.randn(PATCH_VALUES, generator=torch.Generator().manual_seed(MockImages.NAMES.index(name)))


@dataclass
class MockImageProvider(CaptionedImageProvider):
    """Bridge dataset provider over `MockImages`."""

    kind: ClassVar[type[CaptionedImages]] = MockImages
