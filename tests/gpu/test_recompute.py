"""megatron-core's recompute of activations inside real graphs: the same bits in less memory."""

import pytest
import torch

from .common import memories
from .test_parity import NOISE_FLOOR

GRID = [(1, 40, 40), (4, 10, 14)]


def recomputing(model, granularity):
    """Let a tower's layers recompute as their constructor does by these settings."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for config in configs.values():
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = granularity, "uniform", 1
    for layer in model.decoder.layers:
        layer.self_attention.checkpoint_core_attention = granularity == "selective"
        layer.recompute_mlp = granularity == "selective"


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_an_encoders_layers_are_recomputed(tower_module, model, grads, graphs_of, granularity):
    batch = tower_module.make_batch(GRID, model, seed=1)

    def run():
        grads.zero()
        outputs = [output.detach().clone() for output in tower_module.step(model, batch)]
        return outputs, grads.copy()

    expected, first = run()
    noise = tower_module.largest_relative(run()[1], first)
    taken = {}
    for wanted in (None, granularity):
        recomputing(model, wanted)
        helper = graphs_of(buckets=(2304,), slots=1, kernels="exact", max_frames=8)
        (memory,) = memories(helper.graphs)
        found, gradients = run()
        far, taken[wanted] = tower_module.largest_relative(gradients, first), memory.nbytes
        print(
            f"{wanted}: gradients {far:.1e} from eager's, which repeat to {noise:.1e}; {taken[wanted] / 2**20:.0f} MiB"
        )
        assert all(map(torch.equal, found, expected))
        assert far <= max(1.5 * noise, NOISE_FLOOR)
        assert helper.graphs.statistics().replays == 1 and not helper.graphs.statistics().fallbacks
        helper.delete_cuda_graphs()
    assert taken[granularity] <= 0.95 * taken[None]
