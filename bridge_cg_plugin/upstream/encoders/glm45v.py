"""GLM-4.5V's vision encoder, Hugging Face's module, as a region: position embeddings are sampled, patches convolved."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...graphs.planning.buckets import Bucket
from ...graphs.program import Buffers
from ...options import OptionError
from ...upstream_types import UpstreamModule
from ...vision.adapter import EncoderFamily
from ...vision.batch import VisionBatch
from ...vision.encoders.grid_program import GridProgram
from ...vision.encoders.layout import TokenPositions, token_positions
from ...vision.guard import images, poisoned
from ...vision.kernels.packed_attention import PackedSegments
from ..kernels.layers import kernels_available
from ..kernels.saved_tensors import known_activations
from ..seams.own_code import as_shipped
from ..wrappers import overridden
from .packed_towers import (
    PackedTowerAdapter,
    frame_segments,
    held_as,
    reordering_kernels,
    rotation,
)
from .tower_attention import attending, attending_by_cudnn, attending_by_flash, joint_attention


class Glm45VEncoder(GridProgram):
    """Everything from patches to merged embeddings, in one region. Every frame is an image of its own.

    Args:
        model: Hugging Face's `Glm4vVisionModel`.
        exact_below: Batches of up to this many tokens must fill a bucket exactly.
        kernels: Entered around the recorded forward; must let attention take `PackedSegments`.
    """

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Outputs: embeddings `[tokens / merge**2, width]`; what they are made from."""
        model, grid = self.model, images(buffers["grid"])
        segments = frame_segments(grid, bucket)
        positions = token_positions(grid, bucket.tokens, self.merge)
        hidden = model.post_conv_layernorm(poisoned(model.patch_embed(buffers["pixels"]), buffers["grid"]))
        hidden = self._located(hidden, grid, segments, positions)
        angles = model.rotary_pos_emb(torch.stack((positions.row, positions.column), dim=-1))
        rotated = rotation(angles)
        for block in model.blocks:
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=rotated)
        hidden = self._merged(model.post_layernorm(hidden))
        return model.merger(hidden), hidden

    def _located(self, hidden: Tensor, grid: Tensor, segments: PackedSegments, positions: TokenPositions) -> Tensor:
        """Add position embeddings. Upstream counts padding to an image behind the last one, here one of one patch."""
        shapes = functional.pad(grid, (0, 0, 0, 1), value=1)
        located: Tensor = self.model.embeddings(
            hidden, segments.offsets.diff(), shapes, positions.row, positions.column
        )
        return located

    def _merged(self, hidden: Tensor) -> Tensor:
        """Return one row `[cells, width]` for the patches of each embedding."""
        cells = hidden.view(-1, self.merge, self.merge, hidden.shape[-1]).permute(0, 3, 1, 2)
        merged: Tensor = self.model.downsample(cells).view(-1, self.model.config.out_hidden_size)
        return merged

    def output_rows(self, batch: VisionBatch) -> tuple[int, ...]:
        """See `RegionProgram`."""
        return (batch.tokens // self.merge**2,) * 2


class Glm45VAdapter(PackedTowerAdapter):
    """See `PackedTowerAdapter`.

    Raises:
        OptionError: Also where attention drops weights at random.
    """

    encoder = "GLM-4.5V"
    region = Glm45VEncoder

    def __init__(self, model: UpstreamModule) -> None:
        super().__init__(model)
        _refuse_dropout(model.config.attention_dropout)

    def out_of_bounds(self, batch: VisionBatch, misfit: str | None) -> str | None:
        """See `PackedTowerAdapter`: upstream takes the shape of the n-th frame from the n-th row of the grid."""
        sizes = [height * width for frames, height, width in batch.rows for _ in range(frames)]
        if batch.tokens <= sum(sizes[: len(batch.rows)]):
            return None
        several = next((index for index, row in enumerate(batch.rows) if row[0] > 1), None)
        if several is None:
            return misfit
        return (
            f"grid_thw[{several}]={batch.rows[several]}: the encoder takes each frame as an image of its own; "
            "give it one row (1, height, width) for every frame, as the model does with videos"
        )


def _refuse_dropout(share: float) -> None:
    if share:
        raise OptionError(
            "vision_config.attention_dropout",
            share,
            "0 with vision graphs of GLM-4.5V",
            "Its layers attend in packed kernels without dropout. Set it to 0, or switch vision graphs off.",
        )


_attending = attending("Glm4vVisionAttention", joint_attention)


@contextmanager
def recording_kernels(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let attention take `PackedSegments`, and position embeddings be sampled by a kernel with PyTorch's bits."""
    with _attending(modules):
        if not kernels_available() or not as_shipped(functional, "grid_sample"):
            yield
            return
        with overridden(functional, "grid_sample", partial(_grid_sample, functional.grid_sample)):
            yield


def _grid_sample(
    original: Callable[..., Tensor],
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """See `torch.nn.functional.grid_sample`."""
    from ...vision.kernels.bicubic import bicubic_samples, takes

    wanted = (mode, padding_mode, bool(align_corners)) == ("bicubic", "border", False)
    if wanted and input.is_cuda and takes(input, grid):
        return bicubic_samples(input, grid)
    return original(input, grid, mode=mode, padding_mode=padding_mode, align_corners=align_corners)


GLM45V = EncoderFamily(
    name="GLM-4.5V",
    find=held_as("visual", "Glm4vVisionModel"),
    adapt=Glm45VAdapter,
    kernels=recording_kernels,
    reordering_kernels=reordering_kernels,
    direct_attention=attending_by_cudnn("Glm4vVisionAttention", joint_attention),
    flash_attention=attending_by_flash("Glm4vVisionAttention", joint_attention),
    known_activations=known_activations,
)
