"""Qwen3-VL's vision encoder, Bridge's module (dense, MoE and Qwen3.5-VL share it): its graphs and their kernels."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...attention_bounds import DETERMINISTIC_TOKENS, attended_limits
from ...graphs.buckets import Bucket
from ...graphs.program import Buffers, Call
from ...language.packed.batch import OFFSETS
from ...vision.batch import HostGrids
from ...vision.encoder import EncoderFamily, OtherAttention, encoder_call
from ...vision.grid_encoder import GridEncoder, embedded, interpolate
from ...vision.guard import images, poisoned
from ...vision.layout import TokenPositions, rotary_angles, segment_offsets, token_positions
from ..kernels.layers import core_kernels, fused_layer_kernels, fused_layernorm_backward, kernels_available
from ..kernels.rotary import fused_rotary
from ..kernels.transformer_engine import accumulate_from_now_on, fused_accumulation, known_activations
from ..seams.own_code import as_shipped, foreign, refuse_own_code
from ..wrappers import pack_params
from .direct_attention import direct_attention, direct_attention_refusal, flash_attention, flash_attention_refusal


class Qwen3VLEncoder(GridEncoder):
    """Everything from patches to merged embeddings and deepstack features; the model has the parts of Bridge's."""

    deterministic_tokens = DETERMINISTIC_TOKENS

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Outputs: embeddings, then deepstack features, `[tokens / merge**2, width]` each."""
        model, (frames, largest) = self.model, bucket.limits
        grid = images(buffers["grid"])
        positions = token_positions(grid, bucket.tokens, self.merge)
        hidden = model.patch_embed(buffers["pixels"]) + self._embeddings(grid, positions, buffers["grid"])
        hidden, deepstack = model.decoder(
            hidden_states=hidden[:, None],
            attention_mask=None,
            inference_params=None,
            rotary_pos_emb=rotary_angles(positions, self._inverse_frequencies()),
            packed_seq_params=pack_params(dict.fromkeys(OFFSETS, segment_offsets(grid, frames)), largest),
        )
        return model.merger(hidden), *deepstack

    def _embeddings(self, grid: Tensor, positions: TokenPositions, guarded: Tensor) -> Tensor:
        """Return every token's position embedding, `[capacity, width]`."""
        module, guard = self.model.pos_embed, partial(poisoned, guarded=guarded)
        if as_shipped(module, "forward"):
            return interpolate(module.weight, grid, positions, guard)
        return embedded(module, self.model.num_grid_per_side, module.weight.dtype, positions, guard)

    def _inverse_frequencies(self) -> Tensor:
        rotary = self.model.rotary_pos_emb
        refuse_own_code([foreign(rotary, "forward")])  # of a class of somebody else's, too
        if not hasattr(rotary, "inv_freq"):
            rotary(1)  # upstream makes the buffer in its first call
        frequencies: Tensor = rotary.inv_freq
        return frequencies

    def read(
        self,
        grids: HostGrids,
        hidden_states: Tensor,
        grid_thw: Tensor,
        inference_params: Any = None,
        extra_block_kwargs: dict[str, Any] | None = None,
    ) -> Call:
        """See `Encoder`."""
        batch, misfit = self.patches(grids, hidden_states, grid_thw)
        return encoder_call(batch, not (inference_params or extra_block_kwargs), misfit)

    def outputs(self, returned: tuple[Tensor, list[Tensor]]) -> tuple[Tensor, ...]:
        """See `Encoder`: embeddings, then deepstack features."""
        hidden, deepstack = returned
        return hidden, *deepstack

    def returned(self, outputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """See `Encoder`."""
        return outputs[0], list(outputs[1:])

    def bounds(self, capacity: int, frames: int, directly: bool) -> list[tuple[int, ...]]:
        """See `Encoder`: without cuDNN called directly, those of Transformer Engine's attention."""
        return attended_limits(capacity, frames, directly)


def fused_kernels(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Let an encoder's layers call the plugin's kernels; see `core_kernels`."""
    return core_kernels(modules, fused_rotary, fused_layer_kernels)


def reordering_kernels(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Let upstream's modules call kernels that round a gradient otherwise than eager does."""
    return fused_layernorm_backward(modules) if kernels_available() else nullcontext()


def find_vision_model(holder: nn.Module) -> nn.Module | None:
    """Return what a module holds as `vision_model`, or the module where it is a vision model itself."""
    for module in (getattr(holder, "vision_model", None), holder):
        if isinstance(module, nn.Module) and hasattr(module, "patch_embed") and hasattr(module, "decoder"):
            return module
    return None


def core_family(**others: Any) -> EncoderFamily:
    """Return the family of an encoder in megatron-core's layers; arguments as there."""
    common: dict[str, Any] = {
        "kernels": fused_kernels,
        "reordering_kernels": reordering_kernels,
        "fused_accumulation": fused_accumulation,
        "before_eager": accumulate_from_now_on,
        "known_activations": known_activations,
    }
    return EncoderFamily(**common | others)


# Other attention in the place of Transformer Engine's over packed segments.
OVER_SEGMENTS = {
    "direct_attention": OtherAttention(direct_attention, direct_attention_refusal),
    "flash_attention": OtherAttention(flash_attention, flash_attention_refusal),
}
QWEN3_VL = core_family(
    name="Qwen3-VL",
    find=find_vision_model,
    encoder=Qwen3VLEncoder,
    **OVER_SEGMENTS,
)
