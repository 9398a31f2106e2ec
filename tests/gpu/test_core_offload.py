"""The shared option of offloading where megatron-core carries it out: losses of its runs are those without it."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from examples.photographs.processes import TrainingProcess

from .conftest import ENVIRONMENT
from .core_offload import QWEN

GRAPHS = ("cuda_graph_impl=transformer_engine", "cuda_graph_modules=attn")
ATTENTION, ALL = "activation_offload=attention", "activation_offload=all"
RUNS = {
    "eager": (),
    "offloaded": ("--set", ATTENTION),
    "graphs": ("--set", *GRAPHS),
    "graphs offloaded": ("--set", *GRAPHS, ATTENTION),
    "qwen": ("--model", QWEN),
    "qwen offloaded": ("--model", QWEN, "--set", ALL),
    "qwen as released": ("--model", QWEN, "--plugin", "off", "--set", ALL),
}
# Runs that share the GPU, some 9 GB each, beside the session's other training runs.
AT_ONCE = 3


@pytest.fixture(scope="module")
def runs():
    """Return what every run of the module found, an error in its place; all import side by side."""
    environment = {**ENVIRONMENT, "NVTE_CPU_OFFLOAD_V1": "1"}
    with ExitStack() as stack:
        processes = {name: TrainingProcess(module="tests.gpu.core_offload", environment=environment) for name in RUNS}
        for process in processes.values():
            stack.callback(process.close)
        for process in processes.values():
            process.wait_until_ready()

        def train(name):
            try:
                return processes[name].train("eager", RUNS[name], limit_s=150.0)
            except RuntimeError as error:
                return error

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return dict(zip(RUNS, pool.map(train, RUNS), strict=True))


def found(runs, name):
    if isinstance(runs[name], RuntimeError):
        raise runs[name]
    return runs[name]


@pytest.mark.parametrize("graphs, plain", [("offloaded", "eager"), ("graphs offloaded", "graphs")])
def test_layers_that_megatron_core_runs_train_the_same(runs, graphs, plain):
    one, other = found(runs, graphs), found(runs, plain)
    print(graphs, one["offloaded"], one["losses"], other["losses"])
    assert one["offloaded"] > 0 and other["offloaded"] == 0
    assert one["losses"][:4] == pytest.approx(other["losses"][:4], rel=2e-4)
    assert one["losses"] == pytest.approx(other["losses"], rel=5e-3)


def test_qwen3_vls_language_model_offloads_experts(runs):
    one, other = found(runs, "qwen offloaded"), found(runs, "qwen")
    print(one["offloaded"], one["losses"], other["losses"])
    assert one["offloaded"] > 0 and other["offloaded"] == 0
    assert one["losses"] == pytest.approx(other["losses"], rel=1e-4)
    for norms, expected in zip(one["grad_norms"], other["grad_norms"], strict=True):
        assert norms == pytest.approx(expected, rel=2e-2)


def test_as_released_it_offloads_nothing(runs):
    assert found(runs, "qwen as released")["offloaded"] == 0
