"""The contract names every function of upstream that recorded work does not run as eager does."""

import importlib
import json
import sys

import pytest

from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.upstream.seams import contract
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.seam import NEWEST
from tests.scripts import interpreted
from tests.traced import functions_run, place
from tests.unit import delta_nets, packs, radio_towers
from tests.unit import hugging_face_towers as towers
from tests.unit.dispatching import dispatching_on_cpu
from tests.unit.towers import forward, graphs_on, new_tower

IMAGES = [[1, 8, 8], [1, 4, 8]]
# What runs around a model's computation and changes nothing of it: how Hugging Face's modules are called and collect
# what they return, their configurations, and megatron-core's per-layer graphs, which are off.
AROUND = ("transformers.utils.", "transformers.configuration_utils", "torch.nn.modules.module")
COMPUTES_NOTHING = {
    ("transformers.modeling_utils", "AttentionInterface.get_interface"),
    ("megatron.core.transformer.moe.moe_utils", "MoECudaGraphTensorStore.is_empty"),
    ("megatron.core.transformer.moe.token_dispatcher", "MoETokenDispatcher.get_expert_zero_copy_buffers"),
    ("megatron.core.transformer.moe.token_dispatcher", "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize"),
    ("megatron.core.transformer.moe.token_dispatcher", "MoEAlltoAllTokenDispatcher._maybe_update_cuda_sync_point"),
    # All that `all_to_all` calls, which is named.
    ("megatron.core.tensor_parallel.mappings", "_AllToAll.forward"),
    ("megatron.core.tensor_parallel.mappings", "_AllToAll.backward"),
    ("megatron.core.utils", "nvtx_range_push"),
    ("megatron.core.utils", "nvtx_range_pop"),
    ("torch.nn.functional", "dropout"),  # kernels are swapped where nothing is dropped
}


def named():
    """Return the places of the contract's functions as they were shipped, decorators' and what they wrap."""
    modules = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
    found = set()
    for module, targets in contract.CONTRACT.items():
        for target in targets:
            function = contract.shipped(module, target)
            found.add((module, target))
            while function is not None:
                code = getattr(getattr(function, "__func__", function), "__code__", None)
                found |= set() if code is None else {place(code, modules)}
                function = getattr(function, "__wrapped__", None)
    return found


def missing(gone):
    """Return functions that the contract lacks."""
    others = {tuple(each) for each in gone} - named() - COMPUTES_NOTHING
    return sorted((module, name) for module, name in others if not module.startswith(AROUND))


def gone_around(run, on_graphs):
    """Return the functions of upstream that run eager, and not in a replay that runs recorded work again."""
    run()
    eager = functions_run(run)
    with on_graphs() as graphs:
        run()
        before = graphs.statistics().replays
        again = functions_run(run)
        assert graphs.statistics().replays > before and not graphs.statistics().fallbacks
    return eager - again


# How each is built, called, and with what.
ENCODERS = {
    "Qwen3-VL": (new_tower, forward, [[1, 4, 4], [1, 6, 8]]),
    "Qwen2.5-VL": (towers.new_qwen25, towers.run_qwen25, IMAGES),
    "Qwen2.5-Omni": (towers.new_qwen25_omni, towers.run_qwen25, IMAGES),
    "Qwen3-Omni": (towers.new_qwen3_omni, towers.run_qwen3_omni, IMAGES),
    "GLM-4.5V": (towers.new_glm45v, towers.run_qwen25, IMAGES),
    "Pixtral": (towers.new_pixtral, towers.run_pixtral, IMAGES),
    "SigLIP": (towers.new_siglip, towers.run_siglip, 3),
    "Qwen3-Omni's audio": (towers.new_qwen3_omni_audio, towers.run_qwen3_omni_audio, [250, 130]),
    "RADIO": (radio_towers.new_radio, radio_towers.run_tiles, 2),
}


@pytest.mark.parametrize("encoder", ENCODERS)
def test_an_encoder(encoder):
    new, run, size = ENCODERS[encoder]
    model, executor = new(), ReferenceExecutor()
    gone = gone_around(lambda: run(model, size), lambda: graphs_on(model, executor=executor, buckets=(64, 128, 256)))
    assert missing(gone) == []


MIXTURE = {**packs.EXPERTS, "moe_shared_expert_intermediate_size": 16}
DECODERS = {
    "dense": lambda: packs.new_model(),
    "Qwen3-VL": lambda: packs.new_qwen(),
    "experts": lambda: packs.new_model(**MIXTURE),
    "experts, all-to-all": lambda: packs.new_model(**MIXTURE | {"moe_token_dispatcher_type": "alltoall"}),
    "experts' losses": lambda: packs.new_model(
        **MIXTURE | {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    ),
}
NEWEST_DECODERS = {"gated delta nets": lambda: delta_nets.new_delta_nets()}
newest = pytest.mark.skipif(bridge_release() != NEWEST.bridge, reason="others lack some")


@pytest.mark.parametrize("decoder", [*DECODERS, *(pytest.param(each, marks=newest) for each in NEWEST_DECODERS)])
def test_a_packed_decoder(decoder):
    with delta_nets.stand_ins(), dispatching_on_cpu():
        model, arguments = (DECODERS | NEWEST_DECODERS)[decoder](), packs.pack((200, 120))
        options = {"cuda_graph_modules": []} if "experts" in decoder else {}
        on_graphs = packs.graphs_on(model, packs.pack(packs.WARMUP), executor=ReferenceExecutor(), **options)
        gone = gone_around(lambda: packs.losses_and_gradients(model, arguments), lambda: on_graphs)
    assert missing(gone) == []


KERNELS = """
import json

import torch

from tests.interpreted import prepare

prepare()
from bridge_cg_plugin.upstream.kernels.layers import fused_layer_kernels
from bridge_cg_plugin.upstream.kernels.rotary import fused_rotary
from tests.traced import functions_run
from tests.unit.towers import draw, new_tower

tower, batch = new_tower(), draw([[1, 4, 6], [1, 2, 2]])
tower(*batch)
with torch.no_grad():
    eager, gone = functions_run(lambda: tower(*batch)), set()
    for kernels in (fused_layer_kernels, fused_rotary):
        with kernels([tower]):
            gone |= eager - functions_run(lambda: tower(*batch))
print(json.dumps(sorted(gone)))
"""


def test_kernels_of_layers():
    gone = json.loads(interpreted(KERNELS).splitlines()[-1])
    assert ["megatron.core.transformer.mlp", "MLP.forward"] in gone
    assert missing(gone) == []


@newest
@pytest.mark.parametrize("module", contract.CONTRACT)
def test_all_that_is_named_is_there(module):
    importlib.import_module(module)
    assert [target for target in contract.CONTRACT[module] if contract.shipped(module, target) is None] == []
