"""Qwen3-Omni's encoders, Hugging Face's modules, as regions: images in Qwen3-VL's way, and clips of any length.

The audio encoder cuts every clip into chunks of equal length, of which the clip's last may be shorter, and convolves
each alone: three convolutions of stride 2 leave an eighth of its frames, rounded up, as tokens. Attention sees windows
of so many chunks of one clip. All chunks of a clip but its last are full: every place is a closed form of the lengths.
`lengths` are `[clips]` int64 in frames, unused ones zero and behind the others.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...attention_bounds import Shape
from ...graphs.buckets import Bucket, round_up
from ...graphs.fallback import Fallback
from ...graphs.program import Buffers, Call, TensorSpec
from ...graphs.rows import write_rows
from ...upstream_types import UpstreamModule
from ...vision.batch import GRID_DTYPES, EncoderBatch, HostGrids, check_device
from ...vision.encoder import Encoder, EncoderFamily, encoder_call
from ...vision.guard import guarded_shape, images, poisoned, write_guarded
from ...vision.kernels.packed_attention import PackedSegments, packed_attention
from ...vision.layout import (
    TokenPositions,
    most_windows,
    offsets_of,
    owners,
    permuted,
    position_interpolation,
    token_positions,
)
from ..kernels.transformer_engine import known_activations
from .packed_towers import (
    TowerEncoder,
    attending,
    frame_segments,
    held_as,
    joint_attention,
    places,
    projections,
    refuse_unusual,
    result,
    returns_an_object,
    rotation,
    tower_family,
)


class Qwen3OmniEncoder(TowerEncoder):
    """Everything from patches to merged embeddings and deepstack features of `Qwen3OmniMoeVisionEncoder`."""

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Outputs: embeddings, deepstack features, `[tokens / merge**2, width]`; hidden states."""
        model, grid = self.model, images(buffers["grid"])
        segments = frame_segments(grid, bucket)
        positions = token_positions(grid, bucket.tokens, self.merge)
        hidden = model.patch_embed(buffers["pixels"])
        hidden = hidden + self._embeddings(positions, buffers["grid"]).to(hidden.dtype)
        rotated = rotation(model, places(positions))
        deepstack, taken = [], list(model.deepstack_visual_indexes)
        for index, block in enumerate(model.blocks):
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=rotated)
            if index in taken:
                deepstack.append(model.deepstack_merger_list[taken.index(index)](hidden))
        return model.merger(hidden), *deepstack, hidden

    def _embeddings(self, positions: TokenPositions, guarded: Tensor) -> Tensor:
        """Return every token's position embedding, `[capacity, width]` fp32; zero for padding."""
        model = self.model
        indices, weights = position_interpolation(positions, model.num_grid_per_side, torch.float32)
        embeddings: Tensor = (model.pos_embed(indices) * poisoned(weights, guarded)[:, :, None]).sum(0)
        return embeddings

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """See `Encoder`: embeddings, deepstack features, hidden states."""
        return returned.pooler_output, *returned.deepstack_features, returned.last_hidden_state

    def returned(self, outputs: Sequence[Tensor]) -> Any:
        """See `Encoder`."""
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import BaseModelOutputWithDeepstackFeatures

        kind: Any = BaseModelOutputWithDeepstackFeatures
        merged, *deepstack, hidden = outputs
        return kind(last_hidden_state=hidden, pooler_output=merged, deepstack_features=deepstack)


QWEN3_OMNI = tower_family(
    "Qwen3OmniMoeVisionAttention",
    joint_attention,
    name="Qwen3-Omni",
    find=held_as("visual", "Qwen3OmniMoeVisionEncoder"),
    encoder=Qwen3OmniEncoder,
)


STRIDE = 8  # of the convolutions together
# Upstream counts tokens by chunks of so many frames, whatever the configuration.
CHUNK_FRAMES = 100
TOKENS = -(-CHUNK_FRAMES // STRIDE)  # of a full chunk
# What a chunk counts in sizes: 4 of them make a round capacity, where 64 times 13 tokens would be the first.
ROOM = round_up(TOKENS, 16)


def chunks_of[Length: (int, Tensor)](length: Length) -> Length:
    """Return the chunks of a clip of so many frames, or of each of several."""
    return (length + CHUNK_FRAMES - 1) // CHUNK_FRAMES


def tokens_of[Length: (int, Tensor)](length: Length) -> Length:
    """Return the tokens of a clip of so many frames, or of each of several."""
    rest = (length % CHUNK_FRAMES + STRIDE - 1) // STRIDE
    return length // CHUNK_FRAMES * TOKENS + rest


def chunk_frames(lengths: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Return which frame of the batch stands at each place of its chunks.

    Args:
        lengths: As above.
        chunks: Capacity.

    Returns:
        `[chunks, frames]` int64 numbers of frames, and `[chunks, frames]` bool whether there is one; zero where not.
    """
    clip, inside, exists = owners(chunks_of(lengths), chunks)
    frame = inside[:, None] * CHUNK_FRAMES + torch.arange(CHUNK_FRAMES, device=lengths.device)
    valid = exists[:, None] & (frame < lengths[clip][:, None])
    start = (lengths.cumsum(0) - lengths)[clip]
    return torch.where(valid, start[:, None] + frame, 0), valid


def token_places(lengths: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Return where tokens lie that attend, of those that convolutions return for so many whole chunks.

    Returns:
        `[chunks * tokens]` int64, for every attending token its place among the convolutions', with padding behind; and
        the inverse.
    """
    clip, inside, exists = owners(chunks_of(lengths), chunks)
    tokens = tokens_of(lengths)
    ends = tokens.cumsum(0)
    start = inside * TOKENS
    # Of each chunk: tokens before it in the batch, and its own.
    before = torch.where(exists, (ends - tokens)[clip] + start, ends[-1])
    own = torch.where(exists, (tokens[clip] - start).clamp(max=TOKENS), 0)
    here = torch.arange(TOKENS, device=lengths.device)
    number = torch.arange(chunks, device=lengths.device)[:, None] * TOKENS + here
    attends = here < own[:, None]
    # What does not attend keeps its order behind what does.
    skipped = number - before[:, None] - torch.minimum(here, own[:, None])
    place = torch.where(attends, before[:, None] + here, ends[-1] + skipped).view(-1)
    return torch.empty_like(place).scatter_(0, place, number.reshape(-1)), place


def window_ends(lengths: Tensor, windows: int, window: int) -> Tensor:
    """Return `cu_seqlens` of windows in tokens, `[windows + 1]` int32, with windows of no length after the last.

    Args:
        lengths: As above.
        windows: How many there are at most; see `most_windows`.
        window: Chunks that attend to each other.
    """
    counts = -(-chunks_of(lengths) // window)
    clip, inside, exists = owners(counts, windows)
    full = window * TOKENS
    left = tokens_of(lengths)[clip] - inside * full
    return offsets_of(torch.where(exists, left.clamp(max=full), 0))


EXAMPLE = (1, 1, CHUNK_FRAMES)  # a clip
# Clips of the cheaper recordings: fewer windows, so less for attention's kernels to look at.
FEW_CLIPS = 8
_held = held_as("audio_model", "Qwen3OmniMoeAudioEncoder")


class Qwen3OmniAudioEncoder(Encoder):
    """Everything from features to embeddings of `Qwen3OmniMoeAudioEncoder`. Buckets have one limit: clips.

    A batch's pixels are features `[mel, frames]` of all clips, one after another, and its sizes are lengths `[clips]`.
    A bucket's tokens are room for chunks (`ROOM` each), not rows of the layers, which have those of full chunks.

    Raises:
        OptionError: See `refuse_unusual`.
    """

    name = "audio_encoder"
    unit, unit_of = ROOM, "one chunk of audio"

    def prepare(self) -> None:
        """See `Encoder`."""
        refuse_unusual(self.model, "Qwen3-Omni's audio", self.model.conv2d1.weight)
        self._window: int = self.model.n_window_infer // CHUNK_FRAMES

    def input_specs(self, bucket: Bucket) -> dict[str, TensorSpec]:
        """See `RegionProgram`."""
        model = self.model
        frames = bucket.tokens // ROOM * CHUNK_FRAMES
        return {
            "features": TensorSpec((frames, model.num_mel_bins), model.conv2d1.weight.dtype),
            "lengths": TensorSpec(guarded_shape(bucket.limits[0]), torch.int64),
        }

    def refuse(self, batch: EncoderBatch, bucket: Bucket) -> Fallback | None:
        """See `RegionProgram`."""
        return Fallback.TOO_MANY_FRAMES if batch.shape.frames > bucket.limits[0] else None

    def load(self, buffers: Buffers, batch: EncoderBatch) -> None:
        """See `RegionProgram`."""
        assert batch.sizes is not None
        write_rows(buffers["features"], batch.pixels.T)
        write_guarded(buffers["lengths"], functional.pad(batch.sizes[:, None], (2, 0), value=1), batch.rows)

    def load_example(self, buffers: Buffers, bucket: Bucket) -> None:
        """See `RegionProgram`."""
        super().load_example(buffers, bucket)
        write_guarded(buffers["lengths"], torch.tensor([EXAMPLE]), (EXAMPLE,))

    def forward(self, buffers: Buffers, bucket: Bucket) -> tuple[Tensor, ...]:
        """See `RegionProgram`. Output: embeddings `[tokens, width]`."""
        model, chunks = self.model, bucket.tokens // ROOM
        lengths = images(buffers["lengths"])[:, 2]
        frame, exists = chunk_frames(lengths, chunks)
        convolved = self._convolved(torch.where(exists[..., None], buffers["features"][frame], 0))
        positions = model.positional_embedding.positional_embedding[:TOKENS].to(convolved.dtype)
        hidden = (convolved + poisoned(positions, buffers["lengths"])).flatten(0, 1)
        hidden = permuted(hidden, *token_places(lengths, chunks))
        windows = window_ends(lengths, most_windows(chunks, bucket.limits[0], self._window), self._window)
        segments = PackedSegments(windows, min(self._window, chunks) * TOKENS)
        for layer in model.layers:
            hidden = layer(hidden, segments)[0]
        return (model.proj2(model.act(model.proj1(model.ln_post(hidden)))),)

    def _convolved(self, features: Tensor) -> Tensor:
        """Return tokens `[chunks, tokens, width]` of features `[chunks, frames, mel]`."""
        model, parts = self.model, []
        for part in features.transpose(1, 2)[:, None].split(model.conv_chunksize):
            for convolution in (model.conv2d1, model.conv2d2, model.conv2d3):
                part = functional.gelu(convolution(part))
            parts.append(part)
        joined = torch.cat(parts)  # [chunks, channels, mel, tokens]
        tokens: Tensor = model.conv_out(joined.permute(0, 3, 1, 2).flatten(2))
        return tokens

    def output_rows(self, batch: EncoderBatch, bucket: Bucket, outputs: Sequence[Tensor]) -> tuple[int, ...]:
        """See `RegionProgram`."""
        return (sum(tokens_of(length) for _, _, length in batch.rows),)

    def read(self, grids: HostGrids, input_features: Tensor, feature_lens: Tensor, **others: Any) -> Call:
        """See `Encoder`."""
        check_device(input_features, self.model.conv2d1.weight.device)
        misfit = _misfit(input_features, feature_lens, self.model.num_mel_bins)
        lengths = () if misfit is not None else grids.values(feature_lens)
        rows, room = tuple((1, 1, length) for length in lengths), [chunks_of(length) * ROOM for length in lengths]
        # Room for all tokens, clips and room for the longest.
        shape = Shape(sum(room), len(room), max(room, default=0))
        batch = EncoderBatch(input_features, rows, shape, feature_lens)
        return encoder_call(batch, returns_an_object(self.model, others), misfit or _lengths_misfit(batch))

    def outputs(self, returned: Any) -> tuple[Tensor, ...]:
        """See `Encoder`."""
        return (returned.last_hidden_state,)

    def returned(self, outputs: Sequence[Tensor]) -> Any:
        """See `Encoder`."""
        return result(last_hidden_state=outputs[0])

    def bounds(self, capacity: int, frames: int, directly: bool) -> list[tuple[int, ...]]:
        """See `Encoder`: few clips and many; each has a chunk at least."""
        most = min(frames, capacity // self.unit)
        return [(clips,) for clips in sorted({min(FEW_CLIPS, most), most})]


def find(holder: nn.Module) -> nn.Module | None:
    """Return the encoder that a module holds or is; None also where upstream's count of its tokens is wrong."""
    found = _held(holder)
    model: UpstreamModule = found
    if found is None or 2 * model.n_window != CHUNK_FRAMES or model.n_window_infer < CHUNK_FRAMES:
        return None
    return found


def _misfit(features: Tensor, lengths: Any, mel: int) -> str | None:
    """Return how features or lengths differ from what a graph takes, None where they do not."""
    if features.dim() != 2 or features.shape[0] != mel:
        return f"input_features has shape {tuple(features.shape)}, the encoder takes ({mel}, frames)"
    if not isinstance(lengths, Tensor) or lengths.dim() != 1 or lengths.dtype not in GRID_DTYPES:
        found = f"{lengths.dtype} {tuple(lengths.shape)}" if isinstance(lengths, Tensor) else type(lengths).__name__
        return f"feature_lens is {found}, the encoder takes an int32 or int64 tensor (clips,)"
    if lengths.device != features.device:
        return f"feature_lens is on {lengths.device}, input_features on {features.device}"
    return None


def _lengths_misfit(batch: EncoderBatch) -> str | None:
    """Return what is wrong with the lengths of a microbatch, None where nothing is."""
    lengths, frames = [length for _, _, length in batch.rows], batch.pixels.shape[1]
    if min(lengths, default=0) < 1:
        return f"feature_lens={lengths}: there must be a clip, and each must have a frame"
    if sum(lengths) != frames:
        return f"input_features has {frames} frames, feature_lens describes {sum(lengths)}: they belong to other clips"
    if max(lengths) < CHUNK_FRAMES:
        # Upstream pads chunks to the longest of the batch, and its convolutions see what they are padded to.
        return f"no clip has the {CHUNK_FRAMES} frames of a chunk"
    return None


def _attention(attention: UpstreamModule, hidden_states: Tensor, cu_seqlens: PackedSegments, **others: Any) -> Tensor:
    query, key, value = projections(attention, hidden_states, "q_proj", "k_proj", "v_proj")
    context = packed_attention(query, key, value, cu_seqlens, attention.scaling)
    projected: Tensor = attention.out_proj(context.flatten(1))
    return projected


QWEN3_OMNI_AUDIO = EncoderFamily(
    name="Qwen3-Omni's audio",
    find=find,
    encoder=Qwen3OmniAudioEncoder,
    kernels=attending("Qwen3OmniMoeAudioAttention", _attention),
    known_activations=known_activations,
    encodes="audio",
)
