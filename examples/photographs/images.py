"""Photographs from scikit-image, resized at random and put through Qwen's real image processor, as Bridge datasets."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image

from bridge_cg_plugin.recipes.captioned_images import CaptionedImageProvider, CaptionedImages, Images, Vocabulary

# Colour photographs that the package ships; the rest of its gallery would have to be downloaded.
FILES = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg", "hubble_deep_field.jpg")
IMAGE_TOKEN = 151655
# (height, width) in pixels, as mixed as a crawl's; 448 x 448 is 784 patches.
MIXED_SIZES = ((448, 448), (336, 512), (640, 480), (256, 384), (768, 768), (512, 672))
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


def draw_images(seed: int, most: int, sizes: Sequence[tuple[int, int]]) -> Images:
    """Draw 1 to `most` photographs, each at a random size; the same seed gives the same images."""
    rng = random.Random(seed)
    names = tuple(rng.choice(FILES) for _ in range(rng.randint(1, most)))
    pictures = []
    for name in names:
        height, width = rng.choice(sizes)
        pictures.append(photograph(name).resize((width, height), Image.Resampling.BICUBIC))
    processed = image_processor()(images=pictures, return_tensors="pt")
    return Images(processed["pixel_values"], processed["image_grid_thw"], names)


class PhotographDataset(CaptionedImages):
    """Sequences of photographs, each followed by its caption."""

    vocabulary = Vocabulary(vision_start=151652, vision_end=151653, image=IMAGE_TOKEN, words=100_000)

    def draw(self, seed: int) -> Images:
        """Return 1 to `most` photographs, each at a random size."""
        return draw_images(seed, self.most, self.sizes)


@dataclass
class PhotographProvider(CaptionedImageProvider):
    """Bridge dataset provider over `PhotographDataset`."""

    kind: ClassVar[type[CaptionedImages]] = PhotographDataset
