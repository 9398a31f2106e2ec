"""Photographs from scikit-image, resized at random and put through Qwen's real image processor, as Bridge datasets."""

import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.training.config import DatasetBuildContext, DatasetProvider
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

# Colour photographs that the package ships; the rest of its gallery would have to be downloaded.
FILES = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg", "hubble_deep_field.jpg")
VISION_START, VISION_END, IMAGE_TOKEN = 151652, 151653, 151655
CAPTION_TOKENS = 32
# (height, width) in pixels, as mixed as a crawl's; 448 x 448 is 784 patches.
MIXED_SIZES = ((448, 448), (336, 512), (640, 480), (256, 384), (768, 768), (512, 672))
# Few, as cuDNN plans attention anew for every shape that it has not met, which takes longer than a small run.
FEW_SIZES = ((448, 448), (256, 384), (768, 768))
SMALL_SIZES = ((64, 96), (128, 96), (96, 160), (192, 192))


@cache
def photograph(name: str) -> Image.Image:
    """Load one photograph."""
    import skimage

    return Image.open(Path(skimage.__file__).parent / "data" / name).convert("RGB")


@cache
def image_processor() -> Any:
    """Build Qwen3-VL's image processor with its published settings, without any download."""
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    return Qwen2VLImageProcessor(
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": 32 * 32, "longest_edge": 16777216},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


@dataclass(frozen=True, slots=True)
class Images:
    """Some processed photographs.

    Attributes:
        pixels: `[patches, 1536]` fp32.
        grid: `[images, 3]` int64.
        names: Which photographs.
    """

    pixels: Tensor
    grid: Tensor
    names: tuple[str, ...]


def draw_images(seed: int, most: int, sizes: tuple[tuple[int, int], ...]) -> Images:
    """Draw 1 to `most` photographs, each at a random size; the same seed gives the same images."""
    rng = random.Random(seed)
    names = tuple(rng.choice(FILES) for _ in range(rng.randint(1, most)))
    pictures = []
    for name in names:
        height, width = rng.choice(sizes)
        pictures.append(photograph(name).resize((width, height), Image.Resampling.BICUBIC))
    processed = image_processor()(images=pictures, return_tensors="pt")
    return Images(processed["pixel_values"], processed["image_grid_thw"], names)


def caption(name: str, vocabulary: int) -> list[int]:
    """Return a photograph's caption: a fixed token sequence that a model can learn."""
    rng = random.Random(name)
    return [rng.randrange(1000, vocabulary) for _ in range(CAPTION_TOKENS)]


class PhotographDataset(Dataset):
    """Sequences of images, each followed by its caption, padded to a fixed length.

    Args:
        samples: How many.
        sequence: Tokens of a sample.
        most: Images of a sample at most.
        sizes: Their heights and widths in pixels.
        seed: Of the draw.
        text_only_every: Every how many samples one has no image, 0 for none.
        distinct: After so many the samples begin again, kept in memory; 0 for never.
    """

    def __init__(
        self, samples: int, sequence: int, most: int, sizes: tuple, seed: int, text_only_every: int, distinct: int = 0
    ) -> None:
        self.samples, self.sequence, self.most, self.sizes = samples, sequence, most, sizes
        self.seed, self.text_only_every, self.distinct = seed, text_only_every, distinct
        self._kept: dict[int, dict[str, Any]] = {}

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
        images = draw_images(self.seed * 1_000_003 + index, self.most, self.sizes)
        tokens, counted = [], []
        for name, (t, h, w) in zip(images.names, images.grid.tolist(), strict=True):
            words = caption(name, 100_000)
            if not text_only:
                placeholders = [VISION_START, *[IMAGE_TOKEN] * (t * h * w // 4), VISION_END]
                tokens += placeholders
                counted += [0] * len(placeholders)
            tokens += words
            counted += [1] * len(words)
        if len(tokens) > self.sequence + 1:
            raise ValueError(f"sample {index} has {len(tokens)} tokens, seq_length is {self.sequence}")
        padding = self.sequence + 1 - len(tokens)
        ids = torch.tensor(tokens + [0] * padding)
        mask = torch.tensor(counted + [0] * padding, dtype=torch.float)
        return {
            "tokens": ids[:-1],
            "labels": ids[1:],
            "loss_mask": mask[1:],
            "position_ids": torch.arange(self.sequence),
            "images": None if text_only else images,
        }

    @staticmethod
    def collate_fn(items: list[dict[str, Any]]) -> dict[str, Any]:
        """Stack a microbatch; its images lie one behind the other."""
        batch = {key: torch.stack([item[key] for item in items]) for key in items[0] if key != "images"}
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
class PhotographProvider(DatasetProvider):
    """Bridge dataset provider over `PhotographDataset`."""

    seq_length: int = 2048
    most_images: int = 3
    sizes: list[tuple[int, int]] = field(default_factory=lambda: list(MIXED_SIZES))
    seed: int = 1
    text_only_every: int = 0
    distinct: int = 0
    skip_getting_attention_mask_from_dataset: bool = True
    enable_in_batch_packing: bool = False

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Dataset, Dataset, Dataset]:
        """Build train, validation and test sets of the sizes that training asks for."""
        counts = (context.train_samples, context.valid_samples, context.test_samples)
        return tuple(
            PhotographDataset(
                max(count, 1),
                self.seq_length,
                self.most_images,
                tuple(self.sizes),
                self.seed + i,
                self.text_only_every,
                self.distinct,
            )
            for i, count in enumerate(counts)
        )
