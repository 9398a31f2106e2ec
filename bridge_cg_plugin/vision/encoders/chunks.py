"""From the lengths of audio clips to chunks, tokens and windows, on the device.

Qwen3-Omni's encoder cuts every clip into chunks of equal length, of which the clip's last may be shorter, and convolves
each alone: three convolutions of stride 2 leave an eighth of its frames, rounded up, as tokens. Attention sees windows
of so many chunks of one clip. All chunks of a clip but its last are full: every place is a closed form of the lengths.
`lengths` are `[clips]` int64 in frames, unused ones zero and behind the others.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .layout import offsets_of, owners

STRIDE = 8  # of the convolutions together
# Capacities are multiples of a chunk's size and of 64: with 13 tokens a chunk, of 64 chunks; with 16, of 4.
ROUND = 16


@dataclass(frozen=True, slots=True)
class Chunking:
    """How an encoder cuts clips.

    Attributes:
        frames: Frames of a full chunk.
        window: Chunks that attend to each other.
    """

    frames: int
    window: int

    @property
    def tokens(self) -> int:
        """Tokens of a full chunk."""
        return convolved(self.frames)

    @property
    def room(self) -> int:
        """What a chunk counts in sizes: tokens of a full one, rounded up so that few chunks make a round capacity."""
        return -(-self.tokens // ROUND) * ROUND

    def chunks(self, length: int) -> int:
        """Return the chunks of a clip of so many frames."""
        return -(-length // self.frames)

    def clip_tokens(self, length: int) -> int:
        """Return the tokens of a clip of so many frames."""
        full, rest = divmod(length, self.frames)
        return full * self.tokens + convolved(rest)

    def most_windows(self, chunks: int, clips: int) -> int:
        """Return how many windows so many clips of so many chunks together can have.

        A clip of n chunks has ceil(n / window), at most (n + window - 1) / window.
        """
        return min((chunks + (self.window - 1) * clips) // self.window, chunks)


def convolved(frames: int) -> int:
    """Return the tokens that convolutions leave of so many frames."""
    return (frames + STRIDE - 1) // STRIDE


class TokenPlaces(NamedTuple):
    """Where tokens of a padded batch lie: those that convolutions return for whole chunks, and those that attend.

    Attributes:
        order: `[chunks * tokens]` int64, for every attending token its place among the convolutions'; padding behind.
        place: The inverse.
    """

    order: Tensor
    place: Tensor


def chunk_frames(lengths: Tensor, chunks: int, chunking: Chunking) -> tuple[Tensor, Tensor]:
    """Return which frame of the batch stands at each place of its chunks.

    Args:
        lengths: As above.
        chunks: Capacity.
        chunking: How clips are cut.

    Returns:
        `[chunks, frames]` int64 numbers of frames, and `[chunks, frames]` bool whether there is one; zero where not.
    """
    clip, inside, exists = owners(_counts(lengths, chunking), chunks)
    frame = inside[:, None] * chunking.frames + torch.arange(chunking.frames, device=lengths.device)
    valid = exists[:, None] & (frame < lengths[clip][:, None])
    start = (lengths.cumsum(0) - lengths)[clip]
    return torch.where(valid, start[:, None] + frame, 0), valid


def token_places(lengths: Tensor, chunks: int, chunking: Chunking) -> TokenPlaces:
    """Return where the tokens of a batch padded to so many chunks lie; see `TokenPlaces`."""
    clip, inside, exists = owners(_counts(lengths, chunking), chunks)
    tokens = _tokens(lengths, chunking)
    ends = tokens.cumsum(0)
    start = inside * chunking.tokens
    # Of each chunk: tokens before it in the batch, and its own.
    before = torch.where(exists, (ends - tokens)[clip] + start, ends[-1])
    own = torch.where(exists, (tokens[clip] - start).clamp(max=chunking.tokens), 0)
    here = torch.arange(chunking.tokens, device=lengths.device)
    number = torch.arange(chunks, device=lengths.device)[:, None] * chunking.tokens + here
    attends = here < own[:, None]
    # What does not attend keeps its order behind what does.
    skipped = number - before[:, None] - torch.minimum(here, own[:, None])
    place = torch.where(attends, before[:, None] + here, ends[-1] + skipped).view(-1)
    return TokenPlaces(torch.empty_like(place).scatter_(0, place, number.reshape(-1)), place)


def window_ends(lengths: Tensor, windows: int, chunking: Chunking) -> Tensor:
    """Return `cu_seqlens` of windows in tokens, `[windows + 1]` int32, with windows of no length after the last.

    Args:
        lengths: As above.
        windows: How many there are at most; see `Chunking.most_windows`.
        chunking: How clips are cut.
    """
    counts = -(-_counts(lengths, chunking) // chunking.window)
    clip, inside, exists = owners(counts, windows)
    full = chunking.window * chunking.tokens
    left = _tokens(lengths, chunking)[clip] - inside * full
    return offsets_of(torch.where(exists, left.clamp(max=full), 0))


def _counts(lengths: Tensor, chunking: Chunking) -> Tensor:
    return (lengths + chunking.frames - 1) // chunking.frames


def _tokens(lengths: Tensor, chunking: Chunking) -> Tensor:
    rest = (lengths % chunking.frames + STRIDE - 1) // STRIDE
    return lengths // chunking.frames * chunking.tokens + rest
