"""What `bridge-cg explain` refuses: what means nothing, contradicts itself, or training would refuse."""

import pytest

from bridge_cg_plugin.cli.explain import recipes

from .explained import explain


@pytest.mark.parametrize(
    "words, said",
    [
        (["vision_graph=on"], "vision_cuda_graph_impl"),
        (["model.vision_graph=on"], "vision_cuda_graph_impl"),
        (["--max-paked-seqs", "64"], "--max_packed_seqs"),
        (["max_vision_cuda_graph_seq_length=100000000000", "vision_cuda_graph_impl=transformer_engine"], "2147483647"),
        (["cuda_graphs=exact", "rng.te_rng_tracker=false"], "Remove one of the two."),
        (["--graphs", "h200"], "recipe"),
    ],
)
def test_words_that_mean_nothing_or_contradict_each_other_are_refused(capsys, words, said):
    status, out, err = explain(capsys, *words)
    assert (status, out) == (2, "") and said in err


@pytest.mark.parametrize(
    "text, said",
    [
        ("model:\n  vision_graph: true\n", "vision_cuda_graph_impl"),
        ("vision_graph: true\n", "vision_cuda_graph_impl"),
        ("trian:\n  train_iters: 5\n", "Did you mean train?"),
    ],
)
def test_names_in_a_file_that_mean_nothing_are_refused(capsys, tmp_path, text, said):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    status, out, err = explain(capsys, str(path))
    assert (status, out) == (2, "") and said in err


SMALL = "qwen3_vl_small_vision_graphs_pretrain_mock_config"


@pytest.mark.parametrize(
    "word, said",
    [
        ("train=null", "train must be a section, not None. Write train.FIELD=VALUE"),
        ("checkpoint=5", "checkpoint must be a section, not 5"),
        ("train.train_iters=-5", "train.train_iters must be at least 0, not -5"),
        ("train.micro_batch_size=3", "train.global_batch_size must be a multiple of train.micro_batch_size=3, not 4"),
        ("model.tensor_model_parallel_size=-2", "tensor_model_parallel_size must be at least 1, not -2"),
        ("model.tensor_model_parallel_size=5", "a divisor of model.num_attention_heads=8, not 5"),
        ("model.pipeline_model_parallel_size=3", "a divisor of model.num_layers=4, not 3"),
        ("model.hidden_size=1001", "model.hidden_size must be model.vision_config.out_hidden_size=1024, not 1001"),
        ("mixed_precision=foo", ", not 'foo'. Correct it."),
        ("scheduler.lr_warmup_fraction=0.5", "Bridge refuses it. Cannot specify lr_warmup_fraction=0.5 with"),
    ],
)
def test_values_that_training_would_refuse_are_refused(capsys, active, word, said):
    status, out, err = explain(capsys, SMALL, word)
    assert (status, out) == (2, "") and err.startswith(f"Cannot start {SMALL}: ") and said in err


def test_what_a_dry_run_refuses_is_refused(capsys, sft):
    from bridge_cg_plugin.cli.runs import train as run_recipe

    words = [sft, "cuda_graph_impl=transformer_engine"]
    status, out, err = explain(capsys, *words)
    assert (status, out) == (2, "") and "cuda_graph_max_packed_seqs" in err
    assert run_recipe.main(["--recipe", *words, "--dry-run"]) == 2
    assert capsys.readouterr().err == err


def test_a_recipe_where_bridge_is_not_installed(capsys, monkeypatch):
    find = recipes.importlib.util.find_spec
    absent = lambda name, *args: None if name == "megatron.bridge" else find(name, *args)  # noqa: E731
    monkeypatch.setattr(recipes.importlib.util, "find_spec", absent)
    status, out, err = explain(capsys, "qwen3_vl_8b_sft_config")
    assert (status, out) == (2, "") and "megatron-bridge is not installed" in err
