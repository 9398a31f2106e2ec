"""Other people's code in Bridge's encoder, with the kernels and graphs of a GPU: equal to eager, on graphs or not."""

import functools

import pytest

from tests.models import tower

from ..seams.test_contract import missing
from ..traced import functions_run
from .common import vision_graphs
from .conftest import LAYERS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("tower_module")]
GRIDS = [(1, 28, 28)], [(4, 10, 14), (1, 28, 20)]
TE, ATTENTION = "transformer_engine.pytorch", "transformer_engine.pytorch.attention.dot_product_attention"
# How Transformer Engine's attention, which is named, chooses its kernels and hands tensors to them.
CHOOSES_ATTENTION = (
    ("transformer_engine.common.recipe", ""),
    (f"{TE}.quantization", ""),
    (f"{ATTENTION}.utils", ""),
    (f"{ATTENTION}.dot_product_attention", "DotProductAttention.init_fp8_metadata"),
    (f"{ATTENTION}.dot_product_attention", "_unpack_packed_qkv"),
    (f"{ATTENTION}.backends", "FusedAttnBwdArgs."),
    (f"{TE}.cpp_extensions.fused_attn", "FusedAttnBackend."),
    (f"{TE}.graph", "is_graph_capturing"),
    (f"{TE}.module.base", "TransformerEngineBaseModule.prepare_forward_ctx"),
    (f"{TE}.utils", "get_device_compute_capability"),
)


def computes(module, name):
    return not any(module == home and name.startswith(prefix) for home, prefix in CHOOSES_ATTENTION)


def doubled(owner, name="forward"):
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        made = function(*args, **kwargs)
        return (made[0] * 2, *made[1:]) if isinstance(made, tuple) else made * 2

    setattr(owner, name, wrapper)


def layer_scale(training, fused):
    return lambda x, residual, probability: residual + 0.1 * (x[0] if x[1] is None else x[0] + x[1])


def scale_layers(model):
    for layer in model.decoder.layers:
        layer.self_attn_bda = layer.mlp_bda = layer_scale


CAPTURED = {
    "nothing": lambda t: None,
    "layer scale": scale_layers,
    "MLP": lambda t: doubled(t.decoder.layers[0].mlp),
    "attention": lambda t: doubled(t.decoder.layers[0].self_attention),
    "core attention": lambda t: doubled(t.decoder.layers[0].self_attention.core_attention),
    "projection": lambda t: doubled(t.decoder.layers[0].self_attention, "get_query_key_value_tensors"),
    "linear": lambda t: doubled(t.decoder.layers[0].mlp.linear_fc1),
    "patch convolution": lambda t: doubled(t.patch_embed.proj),
    "position embedding": lambda t: doubled(t.pos_embed),
}


def on_graphs(model, kernels="auto"):
    return vision_graphs(model, strict=False, buckets=(1024, 2048), kernels=kernels)


@pytest.mark.parametrize("change", CAPTURED.values(), ids=CAPTURED)
def test_own_code_is_captured(change):
    model = tower.build_tower(layers=LAYERS)
    change(model)
    helper = on_graphs(model)
    try:
        assert helper.graphs.failure is None
        for grid in GRIDS:
            batch = tower.make_batch(grid, model)
            actual = [output.detach() for output in tower.forward(model, batch)]
            with helper.graphs.paused():
                expected = [output.detach() for output in tower.forward(model, batch)]
            assert tower.largest_relative(actual, expected) <= 1e-3
        assert helper.graphs.statistics().replays == len(GRIDS)
    finally:
        helper.delete_cuda_graphs()


@pytest.mark.parametrize("kernels", ["fast", "exact"])
def test_the_contract_names_what_kernels_of_a_gpu_go_around(kernels):
    model = tower.build_tower(layers=2)
    batch = tower.make_batch(GRIDS[1], model)

    def train():
        sum(output.float().sum() for output in tower.forward(model, batch)).backward()

    train()
    eager = functions_run(train)
    helpers = []
    recorded = functions_run(lambda: helpers.append(on_graphs(model, kernels)))
    try:
        assert helpers[0].graphs.failure is None
        gone = [each for each in missing(eager - recorded) if computes(*each)]
        print(*gone, sep="\n")
        assert gone == []
    finally:
        helpers[0].delete_cuda_graphs()
