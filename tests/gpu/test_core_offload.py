"""Offloading by megatron-core beside the plugin: losses of its runs are those without it."""

import pytest

from .core_offload import QWEN
from .trainings import Training

GRAPHS = ("cuda_graph_impl=transformer_engine", "cuda_graph_modules=attn")
ON = "fine_grained_activation_offloading=true"
EXPERTS = (ON, "offload_modules=expert_fc1,moe_act")
CORE = (ON, "offload_modules=qkv_linear,core_attn,attn_proj")
ALL = (ON, "offload_modules=qkv_linear,core_attn,attn_proj,expert_fc1,moe_act,mlp_norm")


def run(*words):
    return Training(
        "eager",
        words,
        steps=8,
        main_job=False,
        module="tests.gpu.core_offload",
        environment=(("NVTE_CPU_OFFLOAD_V1", "1"),),
    )


@pytest.mark.parametrize(
    "offloaded, plain",
    [
        (run("--set", *CORE), run()),
        pytest.param(run("--set", *GRAPHS, *CORE), run("--set", *GRAPHS), marks=pytest.mark.first),
    ],
    ids=["eager", "graphs"],
)
def test_layers_that_megatron_core_runs_train_the_same(trained, offloaded, plain):
    one, other = trained(offloaded), trained(plain)
    print(one["offloaded"], one["losses"], other["losses"])
    assert one["offloaded"] > 0 and other["offloaded"] == 0
    assert one["losses"][:4] == pytest.approx(other["losses"][:4], rel=2e-4)
    assert one["losses"] == pytest.approx(other["losses"], rel=5e-3)


@pytest.mark.parametrize(
    "offloaded, plain",
    [
        (run("--model", QWEN, "--set", *ALL), run("--model", QWEN)),
        pytest.param(run("--model", QWEN, "--set", *CORE), run("--model", QWEN), marks=pytest.mark.first),
        (run("--model", QWEN, "--set", *EXPERTS), run("--model", QWEN)),
    ],
    ids=["all", "attention", "experts"],
)
def test_qwen3_vls_language_model_offloads(trained, offloaded, plain):
    one, other = trained(offloaded), trained(plain)
    print(one["offloaded"], one["losses"], other["losses"])
    assert one["offloaded"] > 0 and other["offloaded"] == 0
    assert one["losses"] == pytest.approx(other["losses"], rel=1e-4)
    for norms, expected in zip(one["grad_norms"], other["grad_norms"], strict=True):
        assert norms == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize(
    "more, less",
    [(run("--model", QWEN, "--set", *ALL), run("--model", QWEN, "--set", *EXPERTS))],
    ids=["attention"],
)
def test_attention_leaves_beside_experts(trained, more, less):
    assert trained(more)["offloaded"] > trained(less)["offloaded"] > 0


@pytest.mark.parametrize("released", [run("--model", QWEN, "--plugin", "off", "--set", *ALL)], ids=["experts"])
def test_as_released_it_offloads_nothing(trained, released):
    assert trained(released)["offloaded"] == 0


# Single options and modules: each run beside the same one without offloading.
TE = "cuda_graph_impl=transformer_engine"
ROUTER = (TE, "cuda_graph_modules=attn,moe_router,moe_preprocess")
STEP = ("cuda_graph_impl=full_iteration",)
NORMS, FUSED = (ON, "offload_modules=attn_norm,mlp_norm"), (ON, "offload_modules=fused_group_mlp")
ATTENTION_NORM, MLP_NORM = (ON, "offload_modules=attn_norm"), (ON, "offload_modules=mlp_norm")
DELAY, HALF = "delay_offload_until_cuda_graph=true", "activation_offload_fraction=0.5"
LIMIT, BOUND = (f"fine_grained_offloading_max_inflight_offloads={number}" for number in (0, 1))
STEPS, MICROBATCHES = 6, 4
DETERMINISTIC = (
    *(("NVTE_CPU_OFFLOAD_V1", "1"), ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")),
    ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
)


def fields(model, *words):
    words = ("--model", model, *(("--set", *words) if words else ()))
    module = "tests.gpu.offload_fields"
    return Training("eager", words, steps=STEPS, main_job=False, module=module, environment=DETERMINISTIC)


def assert_trains_as(one, other):
    print(one["losses"], other["losses"], one["grad_norms"], other["grad_norms"])
    assert len(one["losses"]) == STEPS and other["losses"][-1] != other["losses"][0]
    assert one["losses"][:4] == pytest.approx(other["losses"][:4], rel=2e-4)
    assert one["losses"] == pytest.approx(other["losses"], rel=5e-3)
    assert one["grad_norms"] == pytest.approx(other["grad_norms"], rel=2e-2)


# Model, graphs, what is offloaded, its modules, and layers on graphs.
OFFLOADED = {
    "experts-eager": ("experts", (), EXPERTS, {"expert_fc1", "moe_act"}, 0),
    "experts-graphs": ("experts", ROUTER, EXPERTS, {"expert_fc1", "moe_act"}, 4),
    "norms-eager": ("norms", (), NORMS, {"attn_norm", "mlp_norm"}, 0),
    "attn_norm-graphs": ("norms", (TE, "cuda_graph_modules=moe_router"), ATTENTION_NORM, {"attn_norm"}, 3),
    "mlp_norm-graphs": ("norms", (TE, "cuda_graph_modules=mlp"), MLP_NORM, {"mlp_norm"}, 1),
    "fused-eager": ("fused", (), FUSED, {"fused_group_mlp"}, 0),
    "fused-graphs": ("fused", (TE, "cuda_graph_modules=attn"), FUSED, {"fused_group_mlp"}, 4),
}


@pytest.mark.parametrize(
    "offloaded, plain, modules, layers",
    [
        (fields(model, *graphs, *words), fields(model, *graphs), modules, layers)
        for model, graphs, words, modules, layers in OFFLOADED.values()
    ],
    ids=OFFLOADED,
)
def test_every_module_leaves_and_trains_the_same(trained, offloaded, plain, modules, layers):
    one, other = trained(offloaded), trained(plain)
    assert_trains_as(one, other)
    assert set(one["planned"]) == modules and min(one["planned"].values()) > 0 and one["copied"] > 0
    assert not other["planned"] and not other["copied"]
    assert one["layers"] == other["layers"] == layers


@pytest.mark.parametrize(
    "half, whole, plain",
    [
        (fields("experts", *graphs, *EXPERTS, HALF), fields("experts", *graphs, *EXPERTS), fields("experts", *graphs))
        for graphs in ((), ROUTER)
    ],
    ids=["eager", "graphs"],
)
def test_a_fraction_leaves(trained, half, whole, plain):
    one, all_of_it = trained(half), trained(whole)
    assert_trains_as(one, trained(plain))
    assert 0 < sum(one["planned"].values()) < sum(all_of_it["planned"].values())
    assert 0 < one["copied"] < all_of_it["copied"]


@pytest.mark.parametrize(
    "limited, free, plain",
    [
        (fields("experts", *graphs, *EXPERTS, limit), fields("experts", *graphs, *EXPERTS), fields("experts", *graphs))
        for graphs, limit in (((), BOUND), (ROUTER, LIMIT))
    ],
    ids=["eager", "graphs"],
)
def test_compute_waits_for_copies_above_the_limit(trained, limited, free, plain):
    one, other = trained(limited), trained(free)
    assert_trains_as(one, trained(plain))
    assert one["waited"] > 0 and other["waited"] == 0
    assert one["copied"] == other["copied"]


@pytest.mark.parametrize(
    "delayed, prompt, plain",
    [(fields("experts", *ROUTER, *EXPERTS, DELAY), fields("experts", *ROUTER, *EXPERTS), fields("experts", *ROUTER))],
    ids=["graphs"],
)
def test_copies_of_experts_wait_for_the_next_replay(trained, delayed, prompt, plain):
    one, other = trained(delayed), trained(prompt)
    assert_trains_as(one, trained(plain))
    assert one["delayed"] >= 2 * 4 * MICROBATCHES and other["delayed"] == 0  # modules, layers
    assert one["copied"] == other["copied"] > 0


@pytest.mark.parametrize(
    "half, whole, plain, layers",
    [
        (
            fields("dense", *graphs, *CORE, limit, HALF),
            fields("dense", *graphs, *CORE, limit),
            fields("dense", *graphs),
            layers,
        )
        for graphs, limit, layers in (((TE, "cuda_graph_modules=attn"), LIMIT, 4), (STEP, BOUND, 0))
    ],
    ids=["attention", "step"],
)
def test_options_hold_inside_graphs(trained, half, whole, plain, layers):
    part, all_of_it, none = trained(half), trained(whole), trained(plain)
    for one in (part, all_of_it):
        assert_trains_as(one, none)
        assert set(one["planned"]) == {"qkv_linear", "core_attn", "attn_proj"} and one["waited"] > 0
        assert one["copied"] == 0 and one["layers"] == layers  # copies are part of the graphs
    assert 0 < sum(part["planned"].values()) < sum(all_of_it["planned"].values())
