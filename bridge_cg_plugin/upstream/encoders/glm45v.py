"""GLM-4.5V's vision encoder, Hugging Face's module, as a region: position embeddings are sampled, patches convolved."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from ...graphs.buckets import Bucket
from ...graphs.program import Buffers
from ...vision.batch import EncoderBatch
from ...vision.guard import images, poisoned
from ...vision.layout import token_positions
from ..kernels.layers import kernels_available
from ..seams.own_code import as_shipped
from ..wrappers import overridden
from .packed_towers import (
    TowerEncoder,
    attending,
    frame_segments,
    held_as,
    joint_attention,
    places,
    rotation,
    tower_family,
)

ATTENTION = "Glm4vVisionAttention"


class Glm45VEncoder(TowerEncoder):
    """Everything from patches to merged embeddings of `Glm4vVisionModel`. Every frame is an image of its own."""

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Outputs: embeddings `[tokens / merge**2, width]`; what they are made from."""
        model, grid = self.model, images(buffers["grid"])
        segments = frame_segments(grid, bucket)
        positions = token_positions(grid, bucket.tokens, self.merge)
        hidden = model.post_conv_layernorm(poisoned(model.patch_embed(buffers["pixels"]), buffers["grid"]))
        # Upstream counts padding to an image behind the last one, here one of one patch.
        shapes = functional.pad(grid, (0, 0, 0, 1), value=1)
        hidden = model.embeddings(hidden, segments.offsets.diff(), shapes, positions.row, positions.column)
        rotated = rotation(model, places(positions))
        for block in model.blocks:
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=rotated)
        hidden = self._merged(model.post_layernorm(hidden))
        return model.merger(hidden), hidden

    def _merged(self, hidden: Tensor) -> Tensor:
        """Return one row `[cells, width]` for the patches of each embedding."""
        cells = hidden.view(-1, self.merge, self.merge, hidden.shape[-1]).permute(0, 3, 1, 2)
        merged: Tensor = self.model.downsample(cells).view(-1, self.model.config.out_hidden_size)
        return merged

    def out_of_bounds(self, batch: EncoderBatch, misfit: str | None) -> str | None:
        """See `TowerEncoder`: upstream takes the shape of the n-th frame from the n-th row of the grid."""
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


_attending = attending(ATTENTION, joint_attention)


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


GLM45V = tower_family(
    ATTENTION,
    joint_attention,
    name="GLM-4.5V",
    find=held_as("visual", "Glm4vVisionModel"),
    encoder=Glm45VEncoder,
    kernels=recording_kernels,
)
