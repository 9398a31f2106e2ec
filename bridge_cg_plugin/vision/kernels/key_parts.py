"""Into how many parts PyTorch's flash attention splits the keys of a short segment, to fill a GPU.

The rule is FlashAttention 2's: `num_splits_heuristic` and `set_params_splitkv` in its `flash_api.cpp`.
"""

import math

import numpy as np

# Rows of queries of one program, and how many programs each processor counts for.
PROGRAM_ROWS, PROGRAMS = 64, 2
# A GPU is full from this share of them on; fewer parts do where they are nearly as efficient as the best number.
FILLED, EFFICIENT, MOST_PARTS = 0.8, 0.85, 128
# The widest heads, and keys of one block for them.
BLOCKS = ((64, 256), (128, 128), (256, 64))


def block_of(width: int) -> int:
    """Return how many keys PyTorch's kernel multiplies at once, for heads of a width up to 256."""
    return next(keys for most, keys in BLOCKS if width <= most)


def parts_of(length: int, heads: int, width: int, processors: int) -> int:
    """Return into how many parts PyTorch splits the keys of one segment.

    Args:
        length: Tokens of the segment.
        heads, width: Attention heads and the size of one.
        processors: Streaming multiprocessors of the GPU.
    """
    blocks, programs = -(-length // block_of(width)), heads * -(-length // PROGRAM_ROWS)
    slots = processors * PROGRAMS
    if programs >= FILLED * slots:
        return 1
    efficiency = {}
    for parts in range(1, min(MOST_PARTS, slots, blocks) + 1):
        if parts == 1 or -(-blocks // parts) != -(-blocks // (parts - 1)):
            waves = np.float32(programs * parts) / np.float32(slots)
            efficiency[parts] = float(waves / np.ceil(waves))
    best = max(efficiency.values(), default=0.0)
    return next((parts for parts, found in efficiency.items() if found >= EFFICIENT * best), 1)


def parts_by_length(heads: int, width: int, processors: int) -> list[int]:
    """Return the parts of segments of every length from 0 on; all longer ones have one.

    Args:
        heads, width, processors: See `parts_of`.
    """
    longest = PROGRAM_ROWS * math.ceil(FILLED * PROGRAMS * processors / heads)
    found = [1, *(parts_of(length, heads, width, processors) for length in range(1, longest + 1))]
    split = max((length for length, parts in enumerate(found) if parts > 1), default=0)
    return found[: split + 1]
