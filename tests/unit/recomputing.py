"""Models whose layers upstream runs again in the backward."""

import gc
from contextlib import contextmanager
from itertools import accumulate
from unittest import mock

import torch
from megatron.core.tensor_parallel import random
from torch.profiler import profile

FULL = {
    "each layer": {"recompute_method": "uniform", "recompute_num_layers": 1},
    "two layers": {"recompute_method": "uniform", "recompute_num_layers": 2},
    "the first layer": {"recompute_method": "block", "recompute_num_layers": 1},
}


def let_whole_layers_be_recomputed(model, **fields):
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for config in configs.values():
        vars(config).update(recompute_granularity="full", distribute_saved_activations=False, **fields)
    return model


def recomputing_one_by_one(model):
    return let_whole_layers_be_recomputed(model, **FULL["each layer"])


@contextmanager
def states_of_the_host():
    """Let upstream's recompute put random states of the host back: there is no GPU that has others."""
    with (
        mock.patch.object(random, "_get_all_rng_states", lambda: (torch.get_rng_state(),)),
        mock.patch.object(random, "_set_all_rng_states", torch.set_rng_state),
    ):
        yield


def most_memory(call):
    """Return the most bytes that a call has at once; as in a capture, no garbage is collected meanwhile."""
    gc.disable()
    try:
        with profile(profile_memory=True) as events:
            call()
    finally:
        gc.enable()
    taken = (each for each in events.profiler.kineto_results.events() if each.name() == "[memory]")
    return max(accumulate(each.nbytes() for each in sorted(taken, key=lambda each: each.start_ns())))
