"""The layers of MoonViT, Kimi K2.5's vision encoder, on graphs.

Bridge builds the encoder from code in the model's own repository. That code resizes position embeddings and pools
frames in loops over the host's copy of the grid, so both stay outside: the region takes hidden states and returns their
gradient.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bridge_cg_plugin.attention_bounds import Shape, scanned_limits
from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.fallback import Fallback
from bridge_cg_plugin.graphs.program import Buffers, Call, TensorSpec
from bridge_cg_plugin.graphs.rows import write_rows
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.kernels.transformer_engine import known_activations
from bridge_cg_plugin.upstream.wrappers import overridden
from bridge_cg_plugin.vision.batch import GRID_DTYPES, EncoderBatch, HostGrids, check_device
from bridge_cg_plugin.vision.encoder import Encoder, EncoderFamily, encoder_call
from bridge_cg_plugin.vision.guard import guarded_shape, images, poisoned, write_guarded
from bridge_cg_plugin.vision.kernels.packed_attention import DTYPES, PackedSegments, packed_attention
from bridge_cg_plugin.vision.layout import offsets_of, token_positions


class MoonViTLayers(Encoder):
    """The layers of the remote code's `MoonViT3dEncoder` and the norm behind them; see `Encoder`.

    A batch's pixels are hidden states `[tokens, width]`, frames in turn, each row by row. All patches of an image or
    video see each other. Buckets have the limits (items, tokens of the largest).

    Raises:
        OptionError: The encoder computes in a type that packed attention does not take.
    """

    unit, unit_of = 1, "one patch"

    def prepare(self) -> None:
        """See `Encoder`."""
        self._weight = self.model.final_layernorm.weight
        if self._weight.is_cuda and self._weight.dtype not in DTYPES:
            raise OptionError(
                "model.params_dtype",
                self._weight.dtype,
                "torch.bfloat16 or torch.float16 with vision graphs of MoonViT",
                "Train in bf16, or switch vision graphs off.",
            )
        # The table of rotations is made in the first forward, which may come after the capture.
        self.model.rope_2d.get_freqs_cis(torch.ones((1, 3), dtype=torch.int64), self._weight.device)

    def read(self, grids: HostGrids, hidden_states: Any, grid_thws: Any, **others: Any) -> Call:
        """See `Encoder`."""
        if not isinstance(hidden_states, Tensor) or not _is_grid(grid_thws):
            return Call(None, Fallback.CALL_ARGUMENTS)
        check_device(hidden_states, self._weight.device)
        rows = grids.lookup(grid_thws)
        lengths = [math.prod(row) for row in rows]
        shape = Shape(hidden_states.shape[0], len(lengths), max(lengths, default=0))
        batch = EncoderBatch(hidden_states, rows, shape, grid_thws)
        return encoder_call(batch, not others, self._misfit(batch), input_gradients=True)

    def _misfit(self, batch: EncoderBatch) -> str | None:
        """Return what is wrong with a microbatch, None where nothing is."""
        hidden, rope = batch.pixels, self.model.rope_2d
        if hidden.shape[1:] != self._weight.shape or hidden.dtype != self._weight.dtype:
            return f"hidden_states are {hidden.dtype} {tuple(hidden.shape)}, the layers take {self._weight.dtype} rows"
        for frames, height, width in batch.rows:
            if min(frames, height, width) < 1 or height > rope.max_height or width > rope.max_width:
                return f"grid_thws has {(frames, height, width)}, positions go to {rope.max_height} x {rope.max_width}"
        described = sum(map(math.prod, batch.rows))
        return None if described == batch.tokens > 0 else f"{batch.tokens} patches, grid_thws describes {described}"

    def bounds(self, capacity: int, frames: int, directly: bool) -> list[tuple[int, ...]]:
        """See `Encoder`."""
        return [*scanned_limits(capacity, frames)]

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        return {
            "hidden": TensorSpec((bucket.tokens, len(self._weight)), self._weight.dtype, differentiable=True),
            "grid": TensorSpec(guarded_shape(bucket.limits[0]), torch.int64),
        }

    def load(self, buffers: Buffers, batch: EncoderBatch) -> None:
        """See `RegionProgram`."""
        assert batch.sizes is not None
        write_rows(buffers["hidden"], batch.pixels.detach())
        write_guarded(buffers["grid"], batch.sizes, batch.rows)

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """See `RegionProgram`."""
        super().load_example(buffers, bucket)
        image = (1, 1, min(bucket.tokens, bucket.limits[1], self.model.rope_2d.max_width))
        write_guarded(buffers["grid"], torch.tensor([image]), (image,))

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Output: hidden states `[tokens, width]`."""
        grid = images(buffers["grid"])
        segments = PackedSegments(offsets_of(grid.prod(1)), bucket.limits[1])
        rotation = self._rotation(grid, bucket.tokens)
        hidden = poisoned(buffers["hidden"], buffers["grid"])
        for block in self.model.blocks:
            hidden = block(hidden, segments, bucket.limits[1], rope_freqs_cis=rotation)
        return (self.model.final_layernorm(hidden),)

    def _rotation(self, grid: Tensor, tokens: int) -> Tensor:
        """Return the complex numbers that queries and keys are multiplied with, `[tokens, width of a head / 2]`."""
        rope = self.model.rope_2d
        positions = token_positions(grid, tokens, merge=1)  # row by row
        row, column = positions.row.clamp(max=rope.max_height - 1), positions.column.clamp(max=rope.max_width - 1)
        found: Tensor = rope.freqs_cis[row, column]
        return found

    def differentiable_inputs(self, batch: EncoderBatch) -> tuple[Tensor, ...]:
        """See `RegionProgram`."""
        return (batch.pixels,)


def _is_grid(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == 3 and value.dtype in GRID_DTYPES


def find(holder: nn.Module) -> nn.Module | None:
    """Return the layers of the tower that a model of Bridge holds, of a tower, or the layers themselves.

    Remote code is imported under a name with a hash in it, so classes are told by their names.
    """
    tower = getattr(holder, "vision_tower", holder)
    for module in (getattr(tower, "encoder", None), tower):
        if type(module).__name__ == "MoonViT3dEncoder":
            return module
    return None


@contextmanager
def packed_attention_kernels(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let the layers attend in `PackedSegments`: their own attention reads offsets on the host."""
    with ExitStack() as stack:
        for layer in (layer for module in modules for layer in module.modules()):
            if type(layer).__name__ == "MoonViTEncoderLayer":
                stack.enter_context(overridden(layer, "attention_qkvpacked", partial(_attention, layer)))
        yield


def _attention(
    layer: Any, x: Tensor, cu_seqlens: PackedSegments, max_seqlen: int, rope_freqs_cis: Tensor | None = None
) -> Tensor:
    """Attend as the layer's own method does, whose arguments these are."""
    mixed = layer.wqkv(x).view(len(x), 3, layer.num_heads, layer.hidden_size_per_attention_head)
    query, key, value = mixed.unbind(1)
    query, key = sys.modules[type(layer).__module__].apply_rope(query, key, rope_freqs_cis)
    context = packed_attention(query, key, value, cu_seqlens, layer.hidden_size_per_attention_head**-0.5)
    attended: Tensor = layer.wo(context.reshape(len(x), -1))
    return attended


MOONVIT = EncoderFamily(
    name="MoonViT",
    find=find,
    encoder=MoonViTLayers,
    kernels=packed_attention_kernels,
    known_activations=known_activations,
)
