"""Models whose layers upstream runs again in the backward."""

from contextlib import contextmanager
from unittest import mock

import torch
from megatron.core.tensor_parallel import random

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
