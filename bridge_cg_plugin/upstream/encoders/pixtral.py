"""Ministral 3's vision encoder, Hugging Face's Pixtral, as a region: images of any size, padded to one."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...graphs.buckets import Bucket
from ...graphs.program import Buffers, Call, TensorSpec
from ...options import OptionError
from ...upstream_types import UpstreamModule
from ...vision.batch import BatchError, EncoderBatch, Grid, HostGrids, check_device, shape_of
from ...vision.encoder import encoder_call
from ...vision.guard import images, poisoned, write_guarded
from ...vision.kernels.packed_attention import PackedSegments
from ...vision.layout import token_positions
from ..seams.own_code import as_shipped
from .packed_towers import (
    Rotation,
    TowerEncoder,
    attend,
    frame_segments,
    held_as,
    places,
    projections,
    returns_an_object,
    tower_family,
)

EMBEDDING = 4  # patches: Mistral 3's projector merges 2 x 2 of them


class _Valued(Function):
    """Values in the place of computed ones, whose gradient and type they take: autocast computes in its own."""

    @staticmethod
    def forward(ctx: Any, computed: Tensor, values: Tensor) -> Tensor:
        return values.to(computed.dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class PixtralEncoder(TowerEncoder):
    """Everything from patches to the last layer's hidden states of `PixtralVisionModel`. The projector stays outside.

    Eager convolves whole images, and cuDNN's choice of a kernel depends on their size. So embedded patches come in as
    eager computes them, and the region's own convolution has the backward alone.
    """

    def prepare(self) -> None:
        """See `Encoder`. Patches lie row by row."""
        config = self.model.config
        self._side: int = config.patch_size
        self.merge, self.unit, self.patch = 1, EMBEDDING, (config.num_channels, self._side, self._side)
        # After transformers 5.16 angles are computed from rows and columns, of images of any size.
        self._from_table = not hasattr(self.model.patch_positional_embedding, "recomposition_frequencies")

    def weight(self) -> Tensor:
        """See `GridEncoder`."""
        weight: Tensor = self.model.patch_conv.weight
        return weight

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        embedded = TensorSpec((bucket.tokens, self.model.config.hidden_size), self.weight().dtype)
        return {**super().input_specs(bucket), "embedded": embedded}

    def load(self, buffers: Buffers, batch: EncoderBatch) -> None:
        """See `RegionProgram`: one convolution, and two kernels for each image."""
        start, pixels, embedded = 0, buffers["pixels"], buffers["embedded"]
        aside = self._convolves_aside()
        with torch.no_grad():
            convolved = self.model.patch_conv.forward(batch.pixels.to(self.weight().dtype)) if aside else None
        for image, (_, height, width) in enumerate(batch.rows):
            end = start + height * width
            pixels[start:end].copy_(_patches(batch.pixels[image], height, width, self._side), non_blocking=True)
            if convolved is not None:
                embedded[start:end].copy_(convolved[image, :, :height, :width].flatten(1).T)
            start = end
        pixels[start:].zero_()
        embedded[start:].zero_()
        assert batch.sizes is not None
        grid = torch.nn.functional.pad(batch.sizes.to(torch.int64) // self._side, (1, 0), value=1)
        write_guarded(buffers["grid"], grid, batch.rows)

    def _convolves_aside(self) -> bool:
        """Whether the convolution also runs over whole images, for eager's rounding; another one may draw or count."""
        conv = self.model.patch_conv
        return type(conv) is torch.nn.Conv2d and as_shipped(conv, "forward", "_conv_forward")

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Output: hidden states `[tokens, width]`."""
        model, config, grid = self.model, self.model.config, images(buffers["grid"])
        side = self._side
        positions = token_positions(grid, bucket.tokens, self.merge)
        patches = buffers["pixels"].view(bucket.tokens, *self.patch)
        hidden = model.patch_conv(patches).flatten(1)
        if self._convolves_aside():
            hidden = _Valued.apply(hidden, buffers["embedded"])
        hidden = model.ln_pre(poisoned(hidden[None], buffers["grid"]))
        most = config.image_size // side
        # A grid that is not the host's may lie outside the table; the guard turns what comes of it into NaN.
        numbers = (positions.row * most + positions.column).clamp(max=most**2 - 1)
        place = numbers if self._from_table else places(positions)
        cosines, sines = model.patch_positional_embedding(hidden, place)
        returned = model.transformer(
            hidden,
            attention_mask=frame_segments(grid, bucket),
            position_embeddings=Rotation.of(cosines, sines, rounds=True),
        )
        return (returned.last_hidden_state[0],)

    def read(  # type: ignore[override]  # sizes in place of a grid
        self, grids: HostGrids, pixel_values: Tensor, image_sizes: Any = None, **others: Any
    ) -> Call:
        """See `Encoder`. Bridge's model asks for all hidden states, or the last (transformers 5.23), and reads it."""
        check_device(pixel_values, self.weight().device)
        config, side = self.model.config, self._side
        misfit = _misfit(pixel_values, image_sizes, config.num_channels)
        rows: Grid = ()
        if misfit is None:
            values = [size // side for size in grids.values(image_sizes)]
            rows = tuple((1, *sides) for sides in zip(values[::2], values[1::2], strict=True))
            misfit = _rows_misfit(rows, pixel_values, side)
            if self._from_table:
                _refuse_large(rows, config.image_size // side)
        sizes = image_sizes if isinstance(image_sizes, Tensor) else None
        asked = others.get("output_hidden_states")
        hidden = asked is True or asked == -1
        usual = hidden and returns_an_object(self.model, {**others, "output_hidden_states": False})
        return encoder_call(EncoderBatch(pixel_values, rows, shape_of(rows), sizes), usual, misfit)

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """See `Encoder`."""
        return (returned.hidden_states[-1][0],)

    def returned(self, outputs: Sequence[Tensor]) -> Any:
        """See `Encoder`."""
        from transformers.modeling_outputs import BaseModelOutput

        last = outputs[0][None]
        kind: Any = BaseModelOutput
        return kind(last_hidden_state=last, hidden_states=LastHiddenState((last,)))


def _patches(image: Tensor, height: int, width: int, side: int) -> Tensor:
    """Return the patches of an image `[channels, ...]` row by row, `[patches, values]`; the host copies nothing."""
    cut = image[:, : height * side, : width * side]
    tiles = cut.reshape(-1, height, side, width, side).permute(1, 3, 0, 2, 4)
    return tiles.reshape(height * width, -1)


class LastHiddenState(tuple[Tensor]):
    """Hidden states of all layers, of which a region returns the last alone, `[1, tokens, width]`."""

    def __getitem__(self, index: Any) -> Any:
        """Return the last.

        Raises:
            OptionError: Another one is asked for.
        """
        if index != -1:
            raise OptionError(
                "vision_feature_layer",
                index,
                "-1 with vision graphs of Ministral 3",
                "A graph returns the last layer's hidden states. Set it to -1, or switch vision graphs off.",
            )
        return super().__getitem__(index)


def _misfit(pixels: Tensor, sizes: Any, channels: int) -> str | None:
    """Return how pixels or sizes differ from what a graph takes, None where they do not."""
    if pixels.dim() != 4 or pixels.shape[1] != channels or not pixels.shape[0]:
        shape = tuple(pixels.shape)
        return f"pixel_values has shape {shape}, the encoder takes (images, {channels}, height, width)"
    if not isinstance(sizes, Tensor):
        return f"image_sizes is {type(sizes).__name__}, graphs take a tensor (images, 2)"
    if sizes.shape != (pixels.shape[0], 2) or sizes.is_floating_point() or sizes.dtype is torch.bool:
        found = f"{sizes.dtype} {tuple(sizes.shape)}"
        return f"image_sizes is {found}, graphs take a tensor ({pixels.shape[0]}, 2) of whole numbers"
    return None


def _rows_misfit(rows: Grid, pixels: Tensor, patch: int) -> str | None:
    """Return what is wrong with the sizes of a microbatch, None where nothing is."""
    most = pixels.shape[2] // patch, pixels.shape[3] // patch
    for index, (_, height, width) in enumerate(rows):
        if min(height, width) < 1 or height > most[0] or width > most[1]:
            return (
                f"image_sizes[{index}] is {height} x {width} patches, pixel_values has {most[0]} x {most[1]}: "
                "they belong to different images"
            )
    return None


def _refuse_large(rows: Grid, most: int) -> None:
    """Refuse images whose patches lie behind the table of rotary frequencies, where eager reads out of bounds.

    Raises:
        BatchError: One does.
    """
    for index, (_, height, width) in enumerate(rows):
        if min(height, width) > 0 and (height - 1) * most + width > most**2:
            raise BatchError(
                f"image_sizes[{index}] is {height} x {width} patches, the encoder has positions for {most} x {most}; "
                "resize the image as the model's processor does"
            )


def _attention(
    attention: UpstreamModule,
    hidden_states: Tensor,
    attention_mask: PackedSegments,
    position_embeddings: Rotation,
    **others: Any,
) -> tuple[Tensor, None]:
    from transformers.models.pixtral.modeling_pixtral import apply_rotary_pos_emb

    parts = projections(attention, hidden_states, "q_proj", "k_proj", "v_proj")
    rotate = partial(apply_rotary_pos_emb, unsqueeze_dim=1)
    context = attend(parts, rotate, position_embeddings, attention_mask, attention.scaling)
    return attention.o_proj(context.flatten(1)[None]), None


PIXTRAL = tower_family(
    "PixtralAttention",
    _attention,
    name="Ministral 3",
    find=held_as("vision_tower", "PixtralVisionModel"),
    encoder=PixtralEncoder,
)
