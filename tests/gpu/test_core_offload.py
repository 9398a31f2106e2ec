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
