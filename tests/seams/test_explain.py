import json
from types import SimpleNamespace

import pytest

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks import recipes
from bridge_cg_tools.cli import main


def explain(capsys, *words):
    status = main(["explain", *words])
    out, err = capsys.readouterr()
    return status, out, err


def test_one_object_with_a_key_for_each_part(capsys):
    status, out, err = explain(capsys, "--json", "cuda_graph_scope=full_iteration")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert list(found) == ["language_model", "vision", "packed", "offload", "chosen", "warnings"]
    assert found["language_model"] == {"impl": "full_iteration", "modules": [], "inference_scope": "none"}
    assert "write cuda_graph_impl=full_iteration instead" in found["warnings"][0]


def test_in_words(capsys):
    words = ["--cuda-graph-impl", "transformer_engine", "--cuda_graph_modules", "attn", "mlp"]
    status, out, _ = explain(capsys, *words, "model.vision_cuda_graph_impl=transformer_engine")
    assert status == 0
    assert "language model: per-layer graphs of attention and MLP by Transformer Engine; inference eager" in out
    assert "vision: one graph per bucket over the whole encoder" in out
    assert "packed sequences: no graphs" in out and "offload: off" in out


def test_what_else_was_set_is_said_too(capsys):
    words = [
        "vision_cuda_graph_impl=transformer_engine",
        "vision_cuda_graph_tuning.slots=2",
        "vision_cuda_graph_strict=true",
    ]
    packed = [
        "cuda_graph_impl=transformer_engine",
        "cuda_graph_max_packed_seqs=8",
        "cuda_graph_packed_tuning.max_seqlen=512",
    ]
    status, out, err = explain(capsys, *words, *packed, "cuda_graph_packed_offload=mlp", "rng.te_rng_tracker=true")
    assert status == 0, err
    assert "warm-up steps show; vision_cuda_graph_tuning.slots=2; vision_cuda_graph_strict=True\n" in out
    assert "; activations of mlp go to the host; cuda_graph_packed_tuning.max_seqlen=512\n" in out


@pytest.mark.parametrize(
    "words, reason",
    [
        (["cuda_graph_impl=cuda"], "cuda_graph_impl='cuda'"),
        (["--json", "cuda_graph_impl=none", "cuda_graph_modules=attn"], "nothing is captured"),
        (["cuda_graph_max_packed_seqs=64"], "packed"),
        (["cuda_graph_iml=local"], "cuda_graph_impl"),
        (["missing.yaml"], "missing.yaml"),
        (["cuda_graph_impl=local", "stray"], "stray"),
        (["enable_cuda_graph=true", "cuda_graph_impl=transformer_engine"], "cuda_graph_impl=transformer_engine"),
    ],
)
def test_refused_input(capsys, words, reason):
    status, out, err = explain(capsys, *words)
    assert (status, out) == (2, "")
    assert reason in err and "allowed is" in err


def test_a_yaml_file_and_what_is_written_after_it(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model:\n  cuda_graph_impl: local\n  inference_cuda_graph_scope: block\ntrain:\n  train_iters: 5\n")
    assert json.loads(explain(capsys, "--json", str(path))[1])["language_model"]["inference_scope"] == "block"
    status, out, err = explain(capsys, "--json", str(path), "model.cuda_graph_impl=transformer_engine")
    assert (status, out) == (2, "") and "inference_cuda_graph_scope" in err


def some_recipe_config():
    print("a recipe that talks")
    model = SimpleNamespace(cuda_graph_impl="none", cuda_graph_scope=["full_iteration"], use_te_rng_tracker=False)
    return SimpleNamespace(model=model, rng=SimpleNamespace(te_rng_tracker=False))


@pytest.fixture
def one_recipe(monkeypatch):
    module = SimpleNamespace(some_recipe_config=some_recipe_config)
    monkeypatch.setattr(recipes, "_modules", lambda: iter([module]))


def test_a_recipe_and_overrides(capsys, one_recipe):
    status, out, _ = explain(capsys, "--json", "some_recipe_config")
    assert status == 0 and "keeps graphs off" in json.loads(out)["warnings"][0]
    words = ["cuda_graph_impl=transformer_engine", "cuda_graph_modules=attn"]
    status, out, err = explain(capsys, "some_recipe_config", *words)
    assert (status, out) == (2, "") and "rng.te_rng_tracker=False" in err
    status, out, _ = explain(capsys, "--json", "some_recipe_config", *words, "rng.te_rng_tracker=true")
    assert status == 0 and json.loads(out)["language_model"]["modules"] == ["attn"]


def test_graphs_on_a_recipe(capsys, bridge):
    if not hasattr(bridge, "qwen3_vl_8b_sft_config"):
        pytest.skip("the recipe comes with a later megatron-bridge")
    words = ["qwen3_vl_8b_sft_config", "--graphs", "h200", "--vision-cuda-graph-tuning", "slots=2,kernels=exact"]
    status, out, err = explain(capsys, *words, "model.vision_cuda_graph_strict=true")
    assert status == 0, err
    assert "up to 16384 tokens; " in out and "; vision_cuda_graph_buckets_max_gb=26.0; " in out
    tuned = ("vision_cuda_graph_tuning.slots=2", "vision_cuda_graph_tuning.kernels=exact")
    assert all(f"; {said}; " in out for said in tuned)


def test_an_unknown_recipe_names_the_nearest(capsys, one_recipe):
    status, out, err = explain(capsys, "some_recipe_confg")
    assert (status, out) == (2, "") and "some_recipe_config" in err


def test_a_recipe_that_does_not_build(monkeypatch):
    def broken_config():
        raise OSError("no network")

    module = SimpleNamespace(broken_config=broken_config)
    monkeypatch.setattr(recipes, "_modules", lambda: iter([module]))
    with pytest.raises(OptionError, match="OSError: no network"):
        recipes.build_recipe("broken_config")


def test_recipes_of_bridge_are_found(active):
    assert any(hasattr(module, "qwen3_vl_8b_sft_config") for module in recipes._modules())


def test_doctor_still_refuses_unknown_arguments():
    with pytest.raises(SystemExit):
        main(["doctor", "cuda_graph_impl=local"])
