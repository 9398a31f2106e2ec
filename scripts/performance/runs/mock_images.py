"""Sizes of the mock images that recipes are trained on: one for all, or those of COCO's photographs."""

import argparse
import dataclasses
import importlib
import random
import re
from dataclasses import dataclass
from typing import Any

from scripts.performance.models.workloads import PATCH, coco_image

COCO = "coco"
# Examples that Bridge draws and repeats: fewer where all have one size.
ALIKE, MIXED = 16, 64
# Where Bridge makes an example of a configuration with `image_size`.
EXAMPLES, MAKE = "megatron.bridge.data.builders.mock_vlm_sft", "make_mock_vlm_example"


@dataclass(frozen=True, slots=True)
class MockImages:
    """Which images there are.

    Attributes:
        size: Width and height of all, in pixels; None for photographs' sizes.
    """

    size: tuple[int, int] | None = (1024, 768)

    def words(self) -> list[str]:
        """Return the overrides of `bridge-cg train` for them."""
        count = f"dataset.num_base_examples={MIXED if self.size is None else ALIKE}"
        return [count] if self.size is None else [count, f"dataset.image_size=[{self.size[0]},{self.size[1]}]"]

    def __str__(self) -> str:
        return COCO if self.size is None else f"{self.size[0]}x{self.size[1]}"


def read_images(text: str) -> MockImages:
    """Return what a command line's word stands for.

    Raises:
        argparse.ArgumentTypeError: It is neither.
    """
    if text == COCO:
        return MockImages(None)
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be WIDTHxHEIGHT in pixels, as 1024x768, or {COCO}, not {text!r}")
    return MockImages((int(found[1]), int(found[2])))


def draw_photographs(seed: int) -> None:
    """Let every example that Bridge makes in this process have a size of COCO's; a seed gives the same ones."""
    module: Any = importlib.import_module(EXAMPLES)
    make, sizes = getattr(module, MAKE), random.Random(seed)

    def made(config: Any, *args: Any) -> Any:
        _, height, width = coco_image(sizes)
        return make(dataclasses.replace(config, image_size=(PATCH * width, PATCH * height)), *args)

    setattr(module, MAKE, made)
