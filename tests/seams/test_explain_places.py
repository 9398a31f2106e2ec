"""`bridge-cg explain` for a GPU, nodes and a layout: time, memory and what does not fit."""

import pytest

from bridge_cg_plugin.cli.measured import records

from .explained import explain, found

PRESET = "qwen3_vl_30b_a3b_vision_graphs_h200_sft_config"


@pytest.fixture
def mixture(bridge):
    """A preset whose vision encoder is on one GPU, as it was measured."""
    if not hasattr(bridge, PRESET):
        pytest.skip("the preset derives from a recipe of a later megatron-bridge")
    return PRESET


@pytest.mark.parametrize("step", [step for step in records()["steps"] if step["samples"]], ids=lambda one: one["case"])
def test_a_step_that_was_measured_differs_in_nothing(capsys, bridge, step, tmp_path):
    recipe, *words = step["of"].split()
    if not hasattr(bridge, recipe):
        pytest.skip("the preset derives from a recipe of a later megatron-bridge")
    words += [f"train.global_batch_size={step['samples']}", f"checkpoint.pretrained_checkpoint={tmp_path}"]
    place = ["--gpus_per_node", str(step["gpus"]), "--gpu", "h200"]
    nearest = found(capsys, recipe, *words, *place, f"cuda_graphs={step['setting']}")["nearest"]
    assert (nearest["case"], nearest["graphs_ms"]) == (step["case"], step["graphs_ms"])
    assert nearest["not_measured"] == []


@pytest.mark.parametrize("columns", [80, 160])
def test_five_lines_answer_what_a_user_asks(capsys, mixture, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    status, out, err = explain(capsys, mixture, "--gpu", "H100")
    assert status == 0, err
    lines = out.splitlines()
    heads = [line.partition(":")[0] for line in lines if line[0] != " "]
    assert heads[:5] == ["on graphs", "time a step", "peak memory", "fits", "would bring most"]
    assert columns - 20 < max(map(len, lines)) <= columns
    text = " ".join(out.split())
    assert "on graphs: vision encoder, language model" in text and "Nearest: 509 ms on graphs, 1174 ms eager" in text
    assert "fits: not measured. Nearest, 30b_a3b_8_layers_ep2: h100 (80 GB) no, by a peak of 86.8 GB" in text
    assert "h200" not in text.partition("fits:")[2]
    details = explain(capsys, mixture, "--details", "--graphs", "H200")[1]
    assert "options: " in details and "not measured here: 48 attention, 48 128-expert layers of 2048" in details


def test_nodes_and_layout(capsys, mixture):
    words = [mixture, "--nodes", "2", "--gpus-per-node", "8", "model.tensor_model_parallel_size=2"]
    answer = found(capsys, *words)
    layout = {"gpus": 16, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 8, "replicas": 8}
    assert answer["layout"] == layout
    assert {"model.tensor_model_parallel_size=2", "16 GPUs"} <= {*answer["nearest"]["not_measured"]}
    assert answer["notes"][-1] == (
        "16 GPUs: model.tensor_model_parallel_size=2, model.expert_model_parallel_size=8, 8 data-parallel replicas."
    )
    assert found(capsys, mixture)["layout"] is None


@pytest.mark.parametrize("flag", [["--graphs", "h200"], ["--gpu", "H100"], ["--nodes", "2"], ["--gpus-per-node", "8"]])
def test_a_place_needs_a_recipe(capsys, flag):
    status, out, err = explain(capsys, *flag, "cuda_graph_impl=local")
    assert (status, out) == (2, "") and "without a recipe" in err
