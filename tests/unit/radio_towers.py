"""megatron-core's RADIO on a CPU, and batches for it."""

import torch

from tests.models.radio_tower import PATCH, SMALL_TILE, build_radio, segments_of

SIDE, CLASS_TOKENS = SMALL_TILE["img_h"], SMALL_TILE["class_token_len"]
TOKENS = (SIDE // PATCH) ** 2 + CLASS_TOKENS  # of a tile


def new_radio(seed: int = 0, packed: bool = False, **changes):
    """Build a tower in training mode: of tiles of 4 x 4 patches, or packed of images of any size."""
    return build_radio(seed, packed=packed, **changes)


def draw_tiles(count: int, seed: int = 0):
    """Return so many random tiles."""
    return torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def run_tiles(model, count, seed: int = 0):
    """Return the hidden states, called as megatron-core's model calls the tower; draws come from the seed."""
    torch.manual_seed(seed)
    return [model(draw_tiles(count, seed))]


def run_images(model, sizes, seed: int = 0):
    """Return the hidden states of images of so many pixels each; draws come from the seed."""
    torch.manual_seed(seed)
    segments = segments_of(sizes)
    patches = torch.randn(1, int(segments.cu_seqlens_q[-1]), 3 * PATCH**2)
    return [model(patches, imgs_sizes=torch.tensor(sizes), packed_seq_params=segments)]
