"""Generation between training steps: eager's tokens, options as before, and training as without it."""

from importlib.util import find_spec

import pytest

from .test_module_values import DETERMINISTIC
from .trainings import Training

STEPS = 10
PACKED = ("cuda_graph_impl=transformer_engine", "cuda_graph_max_packed_seqs=8", "cuda_graph_packed_strict=true")
LAYERS = ("cuda_graph_impl=transformer_engine", "cuda_graph_modules=attn,mlp")
# megatron-core's graphs of inference with one cache for all requests decode by this package's kernel alone.
# FlashAttention-4 alone makes its name a namespace, which has no origin.
HAS_FLASH = getattr(find_spec("flash_attn"), "origin", None) is not None
needs_flash = pytest.mark.skipif(not HAS_FLASH, reason="flash_attn not installed")


def run(*words):
    module = "tests.gpu.whole_documents"
    return Training("eager", words, steps=STEPS, main_job=False, module=module, environment=DETERMINISTIC)


def scope(name):
    words = ("cuda_graph_impl=local", f"inference_cuda_graph_scope={name}")
    return run("--generate", "--flash-decode", "--set", *words)


def trio(*words, fields):
    """Return a run that generates, the same without it, and an eager one that generates."""
    return run(*words, "--generate", "--set", *fields), run(*words, "--set", *fields), run(*words, "--generate")


@pytest.mark.parametrize(
    "generating, plain, eager",
    [
        pytest.param(*trio("--packed", fields=PACKED), id="packed"),
        pytest.param(*trio(fields=LAYERS), id="layers"),
    ],
)
def test_between_training_steps(trained, generating, plain, eager):
    result, without, tokens = trained(generating), trained(plain), trained(eager)
    assert len(result["generations"]) == 2
    for found in result["generations"]:
        assert found["same"] and found["options"], found
    assert result["generations"][0]["tokens"] == tokens["generations"][0]["tokens"]
    assert result["generations"][1]["tokens"] != result["generations"][0]["tokens"], "the model has not learned"
    assert result["losses"] == without["losses"]
    assert result["layers"] == without["layers"]
    if result["packed"] is not None:
        assert result["packed"]["replays"] == without["packed"]["replays"] > 0


@needs_flash
@pytest.mark.parametrize(
    "graphs, eager",
    [pytest.param(scope(name), run("--generate", "--flash-decode"), id=name) for name in ("layer", "block")],
)
def test_graphs_of_inference_give_eagers_tokens(trained, graphs, eager):
    found, expected = trained(graphs)["generations"], trained(eager)["generations"]
    assert found[0]["tokens"] == expected[0]["tokens"]
    assert all(each["options"] for each in found)


@pytest.mark.parametrize("static", [scope("layer")], ids=["layer"])
@pytest.mark.skipif(HAS_FLASH, reason="flash_attn is installed")
def test_upstreams_scopes_need_flash_decoding(trained, static):
    with pytest.raises(RuntimeError, match="flash"):
        trained(static)
