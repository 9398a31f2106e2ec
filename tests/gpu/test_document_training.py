"""Bridge's `pretrain()` on documents: `cuda_graph_modules`, generation between steps, megatron-core's offloading.

Runs on graphs train as eager ones, runs that generate as those that do not, runs that offload as those that keep all.
"""

from importlib.util import find_spec

import pytest

from .test_packed_mamba import needs_mamba
from .trainings import Training

STEPS = 8
DETERMINISTIC = (("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"), ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))
ON_GRAPHS = "cuda_graph_impl=transformer_engine"
PACKED = (ON_GRAPHS, "cuda_graph_max_packed_seqs=8", "cuda_graph_packed_strict=true")
AGAIN = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
# megatron-core's graphs of inference with one cache for all requests decode by this package's kernel alone.
# FlashAttention-4 alone makes its name a namespace, which has no origin.
HAS_FLASH = getattr(find_spec("flash_attn"), "origin", None) is not None


def run(*words, environment=DETERMINISTIC):
    module = "tests.gpu.document_training"
    return Training("eager", words, steps=STEPS, main_job=False, module=module, environment=environment)


def pair(model, modules, layers, **further):
    """Return the parameters of a model whose layers are on graphs, and eager."""
    graphs = run("--model", model, "--set", ON_GRAPHS, f"cuda_graph_modules={modules}")
    return pytest.param(graphs, run("--model", model), layers, id=f"{model}-{modules}", **further)


def assert_losses_equal(one, other):
    print(one["losses"], other["losses"])
    assert len(one["losses"]) == STEPS and other["losses"][-1] != other["losses"][0]
    assert one["losses"][:4] == pytest.approx(other["losses"][:4], rel=2e-4)
    assert one["losses"] == pytest.approx(other["losses"], rel=5e-3)


@pytest.mark.parametrize(
    "graphs, eager, layers",
    [
        pair("experts", "moe_router", 2),
        pair("experts", "attn,moe_router,moe_preprocess", 2),
        pair("equal_experts", "moe", 2),
        pair("mamba", "mamba", 2, marks=needs_mamba),
        pair("delta_net_experts", "attn,moe_router,moe_preprocess", 2),
    ],
)
def test_training_is_as_without_graphs(trained, graphs, eager, layers):
    one, other = trained(graphs), trained(eager)
    assert one["layers"] == layers and other["layers"] == 0
    assert_losses_equal(one, other)


@pytest.mark.parametrize(
    "graphs, eager",
    [
        pytest.param(
            run("--model", "delta_nets", "--packed", "--set", *PACKED),
            run("--model", "delta_nets", "--packed"),
            id="delta_nets",
        ),
        pytest.param(
            run(
                "--model",
                "delta_net_experts",
                "--packed",
                "--set",
                *PACKED,
                "cuda_graph_modules=attn,moe_router",
                *AGAIN,
            ),
            run("--model", "delta_net_experts", "--packed", "--set", *AGAIN),
            id="parts of delta_net_experts that run again",
        ),
    ],
)
def test_packs_train_as_without_graphs(trained, graphs, eager):
    one, other = trained(graphs), trained(eager)
    assert one["packed"]["replays"] > 0
    assert_losses_equal(one, other)


def trio(name, *words, fields):
    """Return a run that generates, the same without it, and an eager one that generates."""
    plain = (*words, "--set", *fields)
    return pytest.param(run("--generate", *plain), run(*plain), run(*words, "--generate"), id=name)


@pytest.mark.parametrize(
    "generating, plain, eager",
    [trio("packed", "--packed", fields=PACKED), trio("layers", fields=(ON_GRAPHS, "cuda_graph_modules=attn,mlp"))],
)
def test_generation_between_training_steps(trained, generating, plain, eager):
    result, without, tokens = trained(generating), trained(plain), trained(eager)
    first, second = result["generations"]
    for found in (first, second):
        assert found["same"] and found["options"], found
    assert first["tokens"] == tokens["generations"][0]["tokens"]
    assert second["tokens"] != first["tokens"], "the model has not learned"
    assert result["losses"] == without["losses"]
    assert result["layers"] == without["layers"]
    if result["packed"] is not None:
        assert result["packed"]["replays"] == without["packed"]["replays"] > 0


def scope(name):
    words = ("cuda_graph_impl=local", f"inference_cuda_graph_scope={name}")
    return run("--generate", "--flash-decode", "--set", *words)


@pytest.mark.skipif(not HAS_FLASH, reason="flash_attn not installed")
@pytest.mark.parametrize(
    "graphs, eager",
    [pytest.param(scope(name), run("--generate", "--flash-decode"), id=name) for name in ("layer", "block")],
)
def test_graphs_of_inference_give_eagers_tokens(trained, graphs, eager):
    found, expected = trained(graphs)["generations"], trained(eager)["generations"]
    assert found[0]["tokens"] == expected[0]["tokens"]
    assert all(each["options"] for each in found)


EIGHT_LAYERS = ("--set", "num_layers=8", ON_GRAPHS, "cuda_graph_modules=attn")
OFFLOADED = ("fine_grained_activation_offloading=true", "offload_modules=qkv_linear,core_attn,attn_proj")


def by_core(*words):
    return run(*EIGHT_LAYERS, *words, environment=(*DETERMINISTIC, ("NVTE_CPU_OFFLOAD_V1", "1")))


@pytest.mark.parametrize("offloaded, plain", [(by_core(*OFFLOADED), by_core())], ids=["graphs"])
def test_layers_that_megatron_core_offloads_train_the_same(trained, offloaded, plain):
    one, other = trained(offloaded), trained(plain)
    assert one["offloaded"] > 0 and other["offloaded"] == 0
    assert_losses_equal(one, other)
