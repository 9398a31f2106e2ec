"""What `bridge-cg explain` refuses: what means nothing, contradicts itself, or training would refuse."""

import json

import pytest

from bridge_cg_plugin.cli.explain import recipes

from .explained import explain

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


def test_a_batch_of_no_whole_microbatches_is_refused(capsys, active):
    status, out, err = explain(capsys, SMALL, "train.micro_batch_size=3")
    said = "Cannot use train.global_batch_size=4: it must be a multiple of train.micro_batch_size=3"
    assert (status, out) == (2, "") and err.startswith(said)


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
