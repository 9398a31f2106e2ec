"""Values of `cuda_graph_modules` on models that are not packed, each once through Bridge, against eager."""

from importlib.util import find_spec

import pytest

from .trainings import Training

STEPS = 6
MISSING = [name for name in ("mamba_ssm", "causal_conv1d") if find_spec(name) is None]
needs_mamba = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: docs/packed.md says how")
DETERMINISTIC = (("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"), ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))


def run(model, *words):
    words = ("--model", model, *words)
    module = "tests.gpu.whole_documents"
    return Training("eager", words, steps=STEPS, main_job=False, module=module, environment=DETERMINISTIC)


def with_graphs(model, modules):
    return run(model, "--set", "cuda_graph_impl=transformer_engine", f"cuda_graph_modules={modules}")


CASES = [
    pytest.param("experts", "moe_router", 2, id="moe_router"),
    pytest.param("experts", "moe_router,moe_preprocess", 2, id="moe_router,moe_preprocess"),
    pytest.param("experts", "attn,moe_router,moe_preprocess", 2, id="attn,moe_router,moe_preprocess"),
    pytest.param("equal_experts", "moe", 2, id="moe"),
    pytest.param("mamba", "mamba", 2, id="mamba", marks=needs_mamba),
]


@pytest.mark.parametrize(
    "graphs, eager, layers",
    [
        pytest.param(with_graphs(model, modules), run(model), layers, id=case.id, marks=case.marks)
        for case in CASES
        for model, modules, layers in [case.values]
    ],
)
def test_training_is_as_without_graphs(trained, graphs, eager, layers):
    one, other = trained(graphs), trained(eager)
    print(one["losses"], other["losses"])
    assert one["layers"] == layers and other["layers"] == 0
    assert len(one["losses"]) == STEPS and other["losses"][-1] != other["losses"][0]
    assert one["losses"][:4] == pytest.approx(other["losses"][:4], rel=2e-4)
    assert one["losses"] == pytest.approx(other["losses"], rel=5e-3)
