"""One microbatch's images, video frames or audio clips, checked before anything touches them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..graphs.host_copies import HostCopies
from .encoders.chunks import Chunking
from .fit import Shape

Grid = tuple[tuple[int, int, int], ...]
# Grids whose sums are kept: a replay asks for them once for each bucket that it may take.
KEPT_GRIDS = 64


class HostGrids(HostCopies):
    """Host copies of device grids, any shape ending in 3."""

    def lookup(self, grid: Tensor) -> Grid:
        """Return the grid's rows as integers."""
        return _rows(self.values(grid))


def _rows(values: tuple[int, ...]) -> Grid:
    return tuple(zip(values[::3], values[1::3], values[2::3], strict=True))


@lru_cache(KEPT_GRIDS)
def token_count(grid: Grid) -> int:
    """Return how many patches the grid describes."""
    return sum(t * h * w for t, h, w in grid)


@lru_cache(KEPT_GRIDS)
def shape_of_rows(grid: Grid) -> Shape:
    """Return the shape of images and videos of a grid."""
    frames = sum(t for t, _, _ in grid)
    return Shape(token_count(grid), frames, max((h * w for _, h, w in grid), default=0))


# Of the grids that encoders take: PyTorch repeats rows by no others.
GRID_DTYPES = (torch.int32, torch.int64)


class BatchError(ValueError):
    """The pixels and the grid of a microbatch do not fit each other or the encoder, which refuses them eager, too."""


class _OfGrid:
    """A batch whose size follows from its grid."""

    __slots__ = ()
    rows: Grid

    @property
    def shape(self) -> Shape:
        """Patches, frames and the largest frame."""
        return shape_of_rows(self.rows)

    @property
    def tokens(self) -> int:
        """Patches."""
        return shape_of_rows(self.rows).tokens


@dataclass(frozen=True, slots=True)
class VisionBatch(_OfGrid):
    """A microbatch for a vision encoder.

    Attributes:
        pixels: `[tokens, ...]` patches in merge order, any floating-point dtype.
        grid: `[images, 3]` tensor of (frames, height, width) in patches.
        rows: The same numbers on the host.
    """

    pixels: Tensor
    grid: Tensor
    rows: Grid

    @property
    def tokens(self) -> int:
        """Patches."""
        return self.pixels.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that the encoder reads."""
        return self.pixels, self.grid

    def copied(self) -> "VisionBatch":
        """Return a batch with tensors of its own."""
        return VisionBatch(self.pixels.detach().clone(), self.grid.clone(), self.rows)


@dataclass(frozen=True, slots=True)
class ImageBatch:
    """A microbatch of images that all have one size.

    Attributes:
        pixels: `[images, channels, height, width]`, any floating-point dtype.
        patches: Patches of one image.
    """

    pixels: Tensor
    patches: int

    @property
    def rows(self) -> Grid:
        """The images as grid rows."""
        return ((1, 1, self.patches),) * len(self.pixels)

    @property
    def tokens(self) -> int:
        """Patches."""
        return len(self.pixels) * self.patches

    @property
    def shape(self) -> Shape:
        """Patches, images and patches of one image."""
        return Shape(self.tokens, len(self.pixels), self.patches)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that the encoder reads."""
        return (self.pixels,)

    def copied(self) -> "ImageBatch":
        """Return a batch with tensors of its own."""
        return ImageBatch(self.pixels.detach().clone(), self.patches)


@dataclass(frozen=True, slots=True)
class PaddedImages(_OfGrid):
    """A microbatch of images of any size, padded to one size.

    Attributes:
        pixels: `[images, channels, height, width]`, any floating-point dtype; a row may be smaller than its image.
        sizes: `[images, 2]` tensor of (height, width) in pixels; None where images fill theirs.
        rows: (1, height, width) of every image in patches, on the host.
        patch: Pixels along a patch's side.
    """

    pixels: Tensor
    sizes: Tensor | None
    rows: Grid
    patch: int

    def patches(self, image: int) -> Tensor:
        """Return the patches of one image row by row, `[patches, values]`; the host copies nothing."""
        _, height, width = self.rows[image]
        side = self.patch
        cut = self.pixels[image, :, : height * side, : width * side]
        tiles = cut.reshape(-1, height, side, width, side).permute(1, 3, 0, 2, 4)
        return tiles.reshape(height * width, -1)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that the encoder reads."""
        return (self.pixels,) if self.sizes is None else (self.pixels, self.sizes)

    def copied(self) -> "PaddedImages":
        """Return a batch with tensors of its own."""
        sizes = None if self.sizes is None else self.sizes.clone()
        return PaddedImages(self.pixels.detach().clone(), sizes, self.rows, self.patch)


@dataclass(frozen=True, slots=True)
class EmbeddedImages(_OfGrid):
    """A microbatch of images whose patches are embedded already.

    Attributes:
        pixels: `[images, tokens, width]` hidden states of images of one size, or `[tokens, 1, width]` of images of any
            size, one after another. May require a gradient.
        offsets: `[images + 1]` cumulative tokens of images of any size; None where all have one size.
        rows: (1, 1, tokens) of every image, on the host; of one size, the tokens that there is room for.
    """

    pixels: Tensor
    offsets: Tensor | None
    rows: Grid

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that the encoder reads."""
        return (self.pixels,) if self.offsets is None else (self.pixels, self.offsets)

    def copied(self) -> "EmbeddedImages":
        """Return a batch with tensors of its own."""
        pixels = self.pixels.detach().clone().requires_grad_(self.pixels.requires_grad)
        return EmbeddedImages(pixels, None if self.offsets is None else self.offsets.clone(), self.rows)


@dataclass(frozen=True, slots=True)
class AudioBatch:
    """A microbatch of audio clips.

    Attributes:
        pixels: `[mel, frames]` features of all clips, one after another, any floating-point dtype.
        lengths: `[clips]` tensor of frames.
        rows: (1, 1, frames) of every clip, on the host: an image one patch high.
        chunking: How the encoder cuts clips.
    """

    pixels: Tensor
    lengths: Tensor
    rows: Grid
    chunking: Chunking

    @property
    def tokens(self) -> int:
        """Room for the tokens of all chunks."""
        return sum(self.chunking.chunks(length) for _, _, length in self.rows) * self.chunking.room

    @property
    def shape(self) -> Shape:
        """Room for all tokens, clips and room for the longest."""
        longest = max((length for _, _, length in self.rows), default=0)
        return Shape(self.tokens, len(self.rows), self.chunking.chunks(longest) * self.chunking.room)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that the encoder reads."""
        return self.pixels, self.lengths

    def copied(self) -> "AudioBatch":
        """Return a batch with tensors of its own."""
        return AudioBatch(self.pixels.detach().clone(), self.lengths.clone(), self.rows, self.chunking)


def patch_shape(config: Any) -> tuple[int, int, int, int]:
    """Return channels, frames, height and width of a patch, from a vision configuration."""
    return config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size


def read_patches(
    grids: HostGrids, pixels: Tensor, grid: Tensor, patch: Sequence[int], device: torch.device
) -> VisionBatch:
    """Return the microbatch of a call, its pixels one row a patch as encoders view them; nothing is copied.

    Args:
        grids: Host copies of grids.
        pixels: Patches in any shape whose memory can be viewed as `[tokens, *patch]`.
        grid: `[images, 3]` int32 or int64.
        patch: Channels, frames, height and width of a patch.
        device: Where the encoder is.

    Raises:
        BatchError: No encoder takes pixels or a grid of this kind.
    """
    if not isinstance(grid, Tensor) or grid.dim() != 2 or grid.shape[1] != 3 or grid.dtype not in GRID_DTYPES:
        found = f"{grid.dtype} {tuple(grid.shape)}" if isinstance(grid, Tensor) else type(grid).__name__
        raise BatchError(f"grid_thw is {found}, the encoder takes an int32 or int64 tensor (images, 3)")
    check_device(pixels, device)
    if pixels.dim() != 2 or pixels.shape[1] != math.prod(patch):
        pixels = _as_patches(pixels, patch)
    return VisionBatch(pixels, grid, grids.lookup(grid))


def _as_patches(pixels: Tensor, patch: Sequence[int]) -> Tensor:
    try:
        return pixels.view(-1, *patch)
    except RuntimeError as error:
        raise BatchError(
            f"pixel_values has shape {tuple(pixels.shape)} and strides {pixels.stride()}, the encoder takes what can "
            f"be viewed as (tokens, {', '.join(map(str, patch))}); use the model's processor, or call contiguous()"
        ) from error


def check_device(pixels: Tensor, device: torch.device) -> None:
    """Refuse pixels that are not where the encoder is.

    Raises:
        BatchError: They are not.
    """
    if pixels.device != device:
        raise BatchError(f"pixel_values is on {pixels.device}, the encoder on {device}; move it there")


def patches_misfit(batch: VisionBatch, merge: int) -> str | None:
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
    expected = shape_of_rows(batch.rows).tokens
    if expected == batch.tokens:
        return None
    return f"pixel_values has {batch.tokens} patches, grid_thw describes {expected}: they belong to different images"


def images_misfit(batch: ImageBatch, channels: int, side: int) -> str | None:
    """Return how images differ from `[images, channels, side, side]`, None where they do not."""
    shape = tuple(batch.pixels.shape)
    if len(shape) == 4 and shape[0] >= 1 and shape[1:] == (channels, side, side):
        return None
    return (
        f"pixel_values has shape {shape}, the encoder takes (images, {channels}, {side}, {side}) with at least one "
        "image; resize images as the model's processor does"
    )
