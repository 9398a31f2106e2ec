"""megatron-core's recompute of activations inside real graphs: the same bits in less memory."""

import pytest
import torch

from tests.models import language_model as lm
from tests.models import packed_parity as parity

from .common import add_lora, memories
from .packs import Trained, assert_eagers, graphs_on
from .test_parity import NOISE_FLOOR

GRID = [(1, 40, 40), (4, 10, 14)]


def let_modules_recompute(model, granularity):
    """Set the fields of every configuration that a model's modules have."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    for config in configs.values():
        config.recompute_granularity, config.recompute_method, config.recompute_num_layers = granularity, "uniform", 1


def recomputing(model, granularity):
    """Let a tower's layers recompute as their constructor does by these settings."""
    let_modules_recompute(model, granularity)
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


def test_adapters_drop_once_more_what_they_dropped(tower_module, model, graphs_of):
    add_lora(model, ["linear_qkv", "linear_fc2"], dropout=0.1)
    grads, batch = tower_module.MainGrads(model), tower_module.make_batch(GRID, model, seed=1)

    def replayed(wanted):
        recomputing(model, wanted)
        helper = graphs_of(buckets=(2304,), slots=1, kernels="exact", max_frames=8)
        grads.zero()
        torch.cuda.manual_seed(7)
        outputs = [output.detach().clone() for output in tower_module.step(model, batch)]
        assert helper.graphs.statistics().replays == 1 and not helper.graphs.statistics().fallbacks
        helper.delete_cuda_graphs()
        return outputs, grads.copy()

    (expected, first), (_, other), (outputs, second) = replayed(None), replayed(None), replayed("full")
    noise, far = tower_module.relatives(other, first), tower_module.relatives(second, first)
    said = [f"{which.max():.1e}, median {which.median():.1e}" for which in (far, noise)]
    print("gradients {} from those without recompute, which repeat to {}".format(*said))
    assert all(map(torch.equal, outputs, expected))
    assert (far <= (1.5 * noise).clamp(min=NOISE_FLOOR)).all()


@pytest.mark.parametrize("modules, most", [([], 0.95), (["attn"], 0.3)], ids=["whole", "attention"])
def test_layers_of_packs_are_recomputed(tower_module, modules, most):
    """Whole layers run again inside the backward graph; attention alone is replayed again, one layer at a time."""
    taken = {}
    with parity.deterministic():
        trained = Trained(lm.build_model(lm.Shape(layers=4, hidden=1024, heads=8, ffn=3072)))
        for granularity in (None, "full"):
            let_modules_recompute(trained.model, granularity)
            times = 2 if granularity and modules else 1
            with graphs_on(trained.model, lm.make_pack((500, 200)), modules=modules) as graphs:
                for lengths in ((500, 190, 300), (1024,), (1, 900, 20, 800)):
                    assert_eagers(trained, graphs, lm.make_pack(lengths), f"{granularity}, {lengths}", times=times)
                taken[granularity] = sum(memory.nbytes for memory in memories(graphs))
    print({granularity: f"{nbytes / 2**20:.0f} MiB" for granularity, nbytes in taken.items()})
    assert taken["full"] <= most * taken[None]
