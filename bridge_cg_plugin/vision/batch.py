"""One microbatch's images, video frames or audio clips, checked before anything touches them."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..attention_bounds import Shape
from ..graphs.host_copies import HostCopies

# (frames, height, width) of images or videos, in patches.
Grid = tuple[tuple[int, int, int], ...]
# Grids whose sums are kept: a replay asks for them once for each bucket that it may take.
KEPT_GRIDS = 64
# Of the grids that encoders take: PyTorch repeats rows by no others.
GRID_DTYPES = (torch.int32, torch.int64)


class BatchError(ValueError):
    """The pixels and the grid of a microbatch do not fit each other or the encoder, which refuses them eager, too."""


class HostGrids(HostCopies):
    """Host copies of device grids, any shape ending in 3."""

    def lookup(self, grid: Tensor) -> Grid:
        """Return the grid's rows as integers."""
        values = self.values(grid)
        return tuple(zip(values[::3], values[1::3], values[2::3], strict=True))


@lru_cache(KEPT_GRIDS)
def shape_of(rows: Grid) -> Shape:
    """Return the size of the images and videos that a grid describes."""
    frames = sum(t for t, _, _ in rows)
    return Shape(sum(t * h * w for t, h, w in rows), frames, max((h * w for _, h, w in rows), default=0))


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """A microbatch, with its size on the host.

    Attributes:
        pixels: What is encoded: patches, images, hidden states or frames of audio. May require a gradient.
        rows: Grid of the images and videos, on the host. An audio clip is one patch high.
        shape: The size that buckets are chosen by.
        sizes: What tells the encoder the images' sizes: a grid, sizes in pixels, offsets or lengths, on a device; None
            where all have one size.
    """

    pixels: Tensor
    rows: Grid
    shape: Shape
    sizes: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Patches."""
        return self.shape.tokens


def equal_images(pixels: Tensor, images: int, patches: int) -> EncoderBatch:
    """Return a microbatch of so many images that all have so many patches."""
    return EncoderBatch(pixels, ((1, 1, patches),) * images, Shape(images * patches, images, patches))


def check_device(pixels: Tensor, device: torch.device) -> None:
    """Refuse pixels that are not where the encoder is.

    Raises:
        BatchError: They are not.
    """
    if pixels.device != device:
        raise BatchError(f"pixel_values is on {pixels.device}, the encoder on {device}; move it there")


def patches_misfit(batch: EncoderBatch, merge: int) -> str | None:
    """Return what is wrong with the grid of a microbatch, None where nothing is.

    A grid row that is not positive, not divisible by the merge size, or patches that disagree with the grid.
    """
    if not batch.rows:
        return "grid_thw describes no image; leave the encoder out of such microbatches"
    for index, (t, h, w) in enumerate(batch.rows):
        if min(t, h, w) < 1:
            return f"grid_thw[{index}]={(t, h, w)}: frames, height and width must be at least 1"
        if h % merge or w % merge:
            return (
                f"grid_thw[{index}]={(t, h, w)}: height and width must be multiples of spatial_merge_size={merge}; "
                "resize the image as the model's processor does"
            )
    expected = shape_of(batch.rows).tokens
    if expected == batch.tokens:
        return None
    return f"pixel_values has {batch.tokens} patches, grid_thw describes {expected}: they belong to different images"
