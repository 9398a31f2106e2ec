"""One microbatch's images and video frames, checked before anything touches them."""

from dataclasses import dataclass

from torch import Tensor

from .grids import Grid, frame_count, largest_frame, token_count


class BatchError(ValueError):
    """The pixels and the grid of a microbatch do not fit each other or the encoder."""


@dataclass(frozen=True, slots=True)
class VisionBatch:
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
    def frames(self) -> int:
        """Images and video frames: attention segments."""
        return frame_count(self.rows)

    @property
    def largest_frame(self) -> int:
        """Patches of the largest frame."""
        return largest_frame(self.rows)

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
    def tokens(self) -> int:
        """Patches."""
        return self.frames * self.patches

    @property
    def frames(self) -> int:
        """Images."""
        return self.pixels.shape[0]

    @property
    def largest_frame(self) -> int:
        """Patches of one image."""
        return self.patches

    def copied(self) -> "ImageBatch":
        """Return a batch with tensors of its own."""
        return ImageBatch(self.pixels.detach().clone(), self.patches)


def check_images(batch: ImageBatch, channels: int, side: int) -> None:
    """Refuse images of another shape than the encoder's.

    Raises:
        BatchError: There is no image, or they are not `[images, channels, side, side]`.
    """
    shape = tuple(batch.pixels.shape)
    if len(shape) != 4 or shape[0] < 1 or shape[1:] != (channels, side, side):
        raise BatchError(
            f"pixel_values has shape {shape}, the encoder takes (images, {channels}, {side}, {side}) with at least one "
            "image; resize images as the model's processor does"
        )


def check_batch(batch: VisionBatch, merge: int) -> None:
    """Refuse a microbatch that no encoder could take.

    Raises:
        BatchError: A grid row is not positive, not divisible by the merge size, or the patches disagree with the grid.
    """
    for index, (t, h, w) in enumerate(batch.rows):
        if min(t, h, w) < 1:
            raise BatchError(f"grid_thw[{index}]={(t, h, w)}: frames, height and width must be at least 1")
        if h % merge or w % merge:
            raise BatchError(
                f"grid_thw[{index}]={(t, h, w)}: height and width must be multiples of spatial_merge_size={merge}; "
                "resize the image as the model's processor does"
            )
    expected = token_count(batch.rows)
    if expected != batch.tokens:
        raise BatchError(
            f"pixel_values has {batch.tokens} patches, grid_thw describes {expected}: they belong to different images"
        )
