"""Random states that recorded work may draw from."""

import torch


def random_states() -> tuple[torch.Generator, ...]:
    """Return the generators of megatron-core's tracker.

    Dropout draws from them, and under sequence parallelism they stand in for the default generator in a decoder's
    layers, where attention asks for its state without dropout, too.
    """
    from megatron.core.tensor_parallel.random import get_all_rng_states

    return tuple(state for state in get_all_rng_states().values() if isinstance(state, torch.Generator))
