"""`bridge-cg explain` for a GPU, nodes and a layout, and what it refuses: what means nothing or contradicts itself."""

import json

import pytest

from bridge_cg_plugin.cli.explain import recipes
from bridge_cg_plugin.cli.measured import records

from .conftest import with_presets
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
    if not hasattr(getattr(bridge, recipe)().dataset, "enable_in_batch_packing"):  # before 0.6
        if step["impl"] == "full_iteration":
            pytest.skip("this release's layers take masks")
        words = [word.replace("enable_in_batch_packing", "pack_sequences_in_batch") for word in words]
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
    assert "peak memory: not measured. Steps that were measured took " in text
    assert "fits: not measured: no step of such a model was" in text  # of 48 layers: of 8 one was
    measured = " ".join(explain(capsys, mixture, "--gpu", "H100", "model.num_layers=8")[1].split())
    assert "fits: not measured. Nearest, 30b_a3b_8_layers_ep2: h100 (80 GB) no, by a peak of 86.8 GB" in measured
    assert "would bring most: less memory on h100: model.recompute_granularity=full " in measured
    assert "h200" not in measured.partition("fits:")[2]
    details = explain(capsys, mixture, "--details", "--graphs", "H200")[1]
    assert "options: " in details and "not measured here: 48 attention, 48 128-expert layers of 2048" in details


@with_presets
def test_a_preset_for_a_gpu_that_is_too_small_is_named(capsys, bridge):
    text = " ".join(explain(capsys, "qwen3_vl_8b_vision_graphs_h200_sft_config", "--gpu", "h100")[1].split())
    assert "would bring most: less memory on h100: the preset qwen3_vl_8b_vision_graphs_offload_h100_sft_config" in text


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


SMALL = "qwen3_vl_small_vision_graphs_pretrain_mock_config"


@pytest.mark.parametrize(
    "words, said",
    [
        (["missing.yaml"], "missing.yaml"),
        (["cuda_graph_impl=local", "stray"], "stray"),
        (["vision_graph=on"], "vision_cuda_graph_impl"),
        (["model.vision_graph=on"], "vision_cuda_graph_impl"),
        (["--max-paked-seqs", "64"], "--max_packed_seqs"),
        (["max_vision_cuda_graph_seq_length=100000000000", "vision_cuda_graph_impl=transformer_engine"], "2147483647"),
        (["cuda_graphs=exact", "rng.te_rng_tracker=false"], "Remove one of the two."),
        (["--graphs", "h200"], "recipe"),
        (["vision_cuda_graph_balance=true"], "has gone"),
        (["actor_rollout_ref.actor.megatron.override_transformer_config.vision_cuda_graph_tuning.slots=2"], "has gone"),
        ([SMALL, "policy.megatron_cfg.vision_cuda_graph_tuning.slots=2"], "has gone"),
        (
            [SMALL, "train.micro_batch_size=3"],
            "Cannot use train.global_batch_size=4: it must be a multiple of train.micro_batch_size=3",
        ),
    ],
)
def test_words_that_mean_nothing_or_contradict_each_other_are_refused(capsys, words, said):
    status, out, err = explain(capsys, *words)
    assert (status, out) == (2, "") and said in err and err.startswith("Cannot ")


def test_a_file_may_have_other_fields_of_the_model(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "vision_cuda_graph_kernels: exact\n"
        "model:\n  num_layers: 4\n  vision_cuda_graph_impl: transformer_engine\n  cuda_graph_use_single_mempool: true\n"
    )
    found = json.loads(explain(capsys, "--json", str(path))[1])
    assert found["vision"]["kernels"] == "exact"


def test_a_familys_name_suggests_its_recipes(capsys, sft):
    status, out, err = explain(capsys, "qwen3_vl")
    assert (status, out) == (2, "") and "Did you mean qwen3_vl_8b_sft_config, " in err and "30b_a3b_sft_config" in err
    assert err.endswith("bridge-cg recipes qwen3_vl lists all.\n")
    misspelt = explain(capsys, "Qwen3_vl_8b_sft_confg")[2]
    assert "qwen3_vl_8b_sft_config" in misspelt and "bridge-cg recipes" not in misspelt
    assert explain(capsys, "no_such_name")[2].endswith(" there is no such recipe. bridge-cg recipes lists all.\n")


@pytest.mark.parametrize(
    ("model", "listed"), [("Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl_8b"), ("Qwen/Qwen3-VL-30B-A3B", "qwen3_vl_30b_a3b")]
)
def test_a_models_name_on_the_hub_suggests_its_recipes(capsys, sft, model, listed):
    status, out, err = explain(capsys, model)
    assert (status, out) == (2, "") and f"Did you mean {listed}_sft_config, " in err
    assert err.endswith(f"bridge-cg recipes {listed} lists all.\n")


def test_a_recipe_where_bridge_is_not_installed(capsys, monkeypatch):
    find = recipes.importlib.util.find_spec
    absent = lambda name, *args: None if name == "megatron.bridge" else find(name, *args)  # noqa: E731
    monkeypatch.setattr(recipes.importlib.util, "find_spec", absent)
    status, out, err = explain(capsys, "qwen3_vl_8b_sft_config")
    assert (status, out) == (2, "") and "megatron-bridge is not installed" in err
