"""GLM-4.5V's vision encoder, Hugging Face's module, as a region: position embeddings are sampled, patches convolved."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...graphs.planning.buckets import Bucket
from ...graphs.program import Buffers
from ...upstream_types import UpstreamModule
from ...vision.batch import EncoderBatch
from ...vision.encoder import RecordingKernels
from ...vision.guard import images, poisoned
from ...vision.layout import token_positions
from ..seams.own_code import as_shipped
from ..wrappers import overridden
from .packed_towers import TowerEncoder, frame_segments, held_as, refuse_dropout, rotation_at
from .tower_attention import attending, joint_attention, tower_family

ATTENTION = "Glm4vVisionAttention"


class Glm45VEncoder(TowerEncoder):
    """Everything from patches to merged embeddings of `Glm4vVisionModel`. Every frame is an image of its own."""

    title = "GLM-4.5V"

    def __init__(self, model: UpstreamModule, exact_below: int = 0, kernels: RecordingKernels = nullcontext) -> None:
        super().__init__(model, exact_below, kernels)
        refuse_dropout(model, self.title)

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Outputs: embeddings `[tokens / merge**2, width]`; what they are made from."""
        model, grid = self.model, images(buffers["grid"])
        segments = frame_segments(grid, bucket)
        positions = token_positions(grid, bucket.tokens, self.merge)
        hidden = model.post_conv_layernorm(poisoned(model.patch_embed(buffers["pixels"]), buffers["grid"]))
        # Upstream counts padding to an image behind the last one, here one of one patch.
        shapes = functional.pad(grid, (0, 0, 0, 1), value=1)
        hidden = model.embeddings(hidden, segments.offsets.diff(), shapes, positions.row, positions.column)
        rotated = rotation_at(model, positions)
        for block in model.blocks:
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=rotated)
        hidden = self._merged(model.post_layernorm(hidden))
        return model.merger(hidden), hidden

    def _merged(self, hidden: Tensor) -> Tensor:
        """Return one row `[cells, width]` for the patches of each embedding."""
        cells = hidden.view(-1, self.merge, self.merge, hidden.shape[-1]).permute(0, 3, 1, 2)
        merged: Tensor = self.model.downsample(cells).view(-1, self.model.config.out_hidden_size)
        return merged

    def output_rows(self, batch: EncoderBatch) -> tuple[int, ...]:
        """See `RegionProgram`."""
        return (batch.tokens // self.merge**2,) * 2

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
    """Let attention take `PackedSegments`, and position embeddings be sampled by a matrix product.

    PyTorch's kernel gives all channels of a point to one thread, and adds gradients by atomics.
    """
    with _attending(modules):
        if not as_shipped(functional, "grid_sample"):
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
    bicubic = (mode, padding_mode, bool(align_corners)) == ("bicubic", "border", False)
    one_image = input.dim() == grid.dim() == 4 and input.shape[0] == grid.shape[0] == grid.shape[2] == 1
    if bicubic and one_image and input.dtype == grid.dtype == torch.float32:
        return _samples(input, grid)
    return original(input, grid, mode=mode, padding_mode=padding_mode, align_corners=align_corners)


def _samples(table: Tensor, points: Tensor) -> Tensor:
    """Return one image `[1, channels, height, width]` sampled at `[1, points, 1, 2]`: `[1, channels, points, 1]`."""
    _, channels, height, width = table.shape
    x, y = points.reshape(-1, 2).unbind(1)
    weights = (_cubic_weights(y, height)[:, :, None] * _cubic_weights(x, width)[:, None]).flatten(1)
    with torch.autocast(table.device.type, enabled=False):  # as eager, which samples in fp32
        return (weights @ table[0].permute(1, 2, 0).reshape(-1, channels)).t()[None, :, :, None]


def _cubic_weights(coordinates: Tensor, size: int) -> Tensor:
    """Return what each of `size` cells counts for at coordinates in [-1, 1], `[points, size]`.

    The formula is `cubic_interp1d` in PyTorch's `GridSampler.cuh`; cells behind an edge count for the edge.
    """
    place = ((coordinates + 1) * size - 1) / 2
    steps = torch.arange(-1, 3, device=place.device)
    away = (place - place.floor())[:, None].sub(steps).abs()
    near, far = (1.25 * away - 2.25) * away**2 + 1, ((-0.75 * away + 3.75) * away - 6) * away + 3
    cells = (place.floor().long()[:, None] + steps).clamp(0, size - 1)
    counted = cells[:, :, None] == torch.arange(size, device=place.device)
    return (torch.where(away <= 1, near, far)[:, :, None] * counted).sum(1)


GLM45V = tower_family(
    ATTENTION,
    joint_attention,
    name="GLM-4.5V",
    find=held_as("visual", "Glm4vVisionModel"),
    encoder=Glm45VEncoder,
    kernels=recording_kernels,
)
