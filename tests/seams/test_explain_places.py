"""`bridge-cg explain` for a GPU, nodes and a layout: time, memory and what does not fit."""

import pytest

from bridge_cg_plugin.cli.measured import TOWER, of_encoder

from .explained import explain, found

PRESET = "qwen3_vl_30b_a3b_vision_graphs_h200_sft_config"


@pytest.fixture
def mixture(bridge):
    """A preset whose vision encoder is on one GPU, as it was measured."""
    if not hasattr(bridge, PRESET):
        pytest.skip("the preset derives from a recipe of a later megatron-bridge")
    return PRESET


def test_time_and_memory_of_a_preset(capsys, mixture):
    default = "vision_cuda_graph_tuning.kernels=auto"
    for words in ([], ["--graphs", "h200"], [default]):
        answer = found(capsys, mixture, *words)
        encoder, language_model = answer["table"]
        measured = of_encoder(TOWER, "auto" if default in words else "exact")
        ratios = [row.ratio for row in measured.rows if row.tokens <= 16384]
        figures = f"{measured.memory_gb(16384):.1f} GiB", f"{min(ratios):.2f}-{max(ratios):.2f}"
        assert (encoder["memory"], encoder["ratio"]) == figures
        assert {language_model["memory"], language_model["ratio"]} == {"not measured"}
        forecast = answer["forecast"]
        assert forecast["of"] == "Qwen3-VL encoder of 27 layers of 1152" and forecast["not_measured"] == []
        assert (
            forecast["measured"].items()
            >= {
                "file": "docs/benchmarks/vision_bench.jsonl",
                "date": "2026-11-22",
                "gpu": "NVIDIA H200",
            }.items()
        )
        assert forecast["largest_bucket"] == 16384
    text = explain(capsys, mixture)[1]
    assert max(map(len, text.splitlines())) <= 80


def test_nodes_and_layout(capsys, mixture):
    words = [mixture, "--nodes", "2", "--gpus-per-node", "8", "model.tensor_model_parallel_size=2"]
    answer = found(capsys, *words)
    layout = {"gpus": 16, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 8, "replicas": 8}
    assert answer["layout"] == layout
    assert answer["forecast"]["not_measured"] == ["model.tensor_model_parallel_size=2"]
    assert answer["notes"][-1] == (
        "16 GPUs: model.tensor_model_parallel_size=2, model.expert_model_parallel_size=8, 8 data-parallel replicas."
    )
    assert found(capsys, mixture)["layout"] is None


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "1"],
        ["--nodes", "2", "--gpus_per_node", "8", "model.pipeline_model_parallel_size=3"],
    ],
)
def test_gpus_that_do_not_fit_are_refused_as_a_dry_run_refuses_them(capsys, mixture, words, tmp_path):
    from bridge_cg_plugin.cli.runs import train as run_recipe

    status, out, err = explain(capsys, mixture, *words)
    assert (status, out) == (2, "") and err.startswith("Cannot ")
    if words == ["--nodes", "1"]:  # one process is what `train` starts without a launcher, of any layout
        words = [*words, "--launcher", "torchrun"]
    checkpoint = f"checkpoint.pretrained_checkpoint={tmp_path}"
    assert run_recipe.main(["--recipe", mixture, *words, checkpoint, "--dry-run"]) == 2
    assert capsys.readouterr().err == err


@pytest.mark.parametrize("flag", [["--graphs", "h200"], ["--nodes", "2"], ["--gpus-per-node", "8"]])
def test_a_place_needs_a_recipe(capsys, flag):
    status, out, err = explain(capsys, *flag, "cuda_graph_impl=local")
    assert (status, out) == (2, "") and "without a recipe" in err
