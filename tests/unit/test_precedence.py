"""What a user writes wins over what a recipe holds; what the user wrote twice in contradiction is refused."""

from types import SimpleNamespace

import pytest

from bridge_cg_plugin.options import InferenceCudaGraphScope, OptionError, graph_options, normalize
from bridge_cg_plugin.options.language_model import IMPLEMENTATIONS

S = InferenceCudaGraphScope
FULL_SCOPE = "cuda_graph_scope=full_iteration"


def recipe(**fields):
    """Return a configuration as a recipe of Bridge 0.6 leaves it."""
    model = {"cuda_graph_impl": "none", "cuda_graph_modules": None, "cuda_graph_scope": None, **fields}
    return SimpleNamespace(model=SimpleNamespace(**model))


RECIPES = [
    recipe(),
    recipe(cuda_graph_modules=["attn", "mlp"]),
    recipe(cuda_graph_impl="transformer_engine", cuda_graph_modules=["attn"]),
    recipe(cuda_graph_impl="transformer_engine", cuda_graph_scope=["moe_router", "moe_preprocess"]),
    recipe(cuda_graph_impl="local", inference_cuda_graph_scope="layer"),
    recipe(cuda_graph_impl="local", cuda_graph_scope=["full_iteration_inference"]),
    recipe(cuda_graph_impl="local", cuda_graph_scope=["full_iteration"]),
    recipe(cuda_graph_impl="full_iteration"),
    recipe(enable_cuda_graph=True),
    recipe(external_cuda_graph=True, cuda_graph_modules=["attn"]),
]


NAMED = [f"cuda_graph_impl={impl} cuda_graph_modules={m}" for impl in IMPLEMENTATIONS for m in ("attn", "attn,mlp")]
WRITTEN = [
    *(FULL_SCOPE, {"cuda_graph_modules": "full_iteration"}, f"cuda_graph_impl=local {FULL_SCOPE}"),
    *(f"cuda_graph_impl={impl}" for impl in IMPLEMENTATIONS),
    *NAMED,
]


@pytest.mark.parametrize("config", RECIPES, ids=lambda c: str(vars(c.model)))
@pytest.mark.parametrize("written", WRITTEN, ids=str)
def test_what_the_user_wrote_means_the_same_over_any_recipe(config, written):
    """But that beside a recipe's old word, local is how older releases spell what the word says."""
    if written == "cuda_graph_impl=local" and "full_iteration" in str(config.model.cuda_graph_scope):
        return
    try:
        alone = graph_options(written).language_model
    except OptionError:
        with pytest.raises(OptionError):
            graph_options(config, written)
        return
    over = graph_options(config, written).language_model
    assert over.impl == alone.impl and over.inference_scope == alone.inference_scope
    if over.impl == "full_iteration" or written in NAMED:
        assert over.modules == alone.modules


@pytest.mark.parametrize("impl", ["none", "local", "full_iteration"])
@pytest.mark.parametrize("written", ["cuda_graph_impl=local", "model.cuda_graph_impl=local", "enable_cuda_graph=true"])
@pytest.mark.parametrize(
    "word, meaning", [("full_iteration", ("full_iteration", S.none)), ("full_iteration_inference", ("local", S.block))]
)
def test_local_of_the_user_keeps_what_a_recipes_old_word_says(impl, written, word, meaning):
    """So upstream's recipes of full iteration are written."""
    config = recipe(cuda_graph_impl=impl, cuda_graph_scope=[word])
    found = graph_options(config, written).language_model
    assert (found.impl, found.inference_scope) == meaning
    assert dropped(config, written) == []


def dropped(config, written):
    return [text for text in normalize(config, written)[0].warnings if "dropped" in text]


@pytest.mark.parametrize(
    "words",
    [
        [{"cuda_graph_impl": "full_iteration"}, "model.cuda_graph_modules=[attn]"],
        [{"cuda_graph_scope": "full_iteration"}, "model.cuda_graph_impl=transformer_engine"],
        [f"{FULL_SCOPE} inference_cuda_graph_scope=block"],
        [
            "vision_cuda_graph_impl=transformer_engine vision_cuda_graph_buckets=64,128 "
            "max_vision_cuda_graph_seq_length=64"
        ],
    ],
    ids=str,
)
@pytest.mark.parametrize("config", [None, RECIPES[2]], ids=["alone", "over_a_recipe"])
def test_a_contradiction_of_the_users_own_is_refused(config, words):
    with pytest.raises(OptionError, match="it must be"):
        graph_options(config, *words)


VISION = {"vision_cuda_graph_impl": "transformer_engine"}


def test_buckets_of_the_user_reach_beyond_a_recipes_limit():
    config = recipe(**VISION, max_vision_cuda_graph_seq_length=16384)
    found = graph_options(config, "vision_cuda_graph_buckets=1024,32768")
    assert found.vision.buckets == (1024, 32768) and found.vision.max_seq_length is None
    assert dropped(config, "vision_cuda_graph_buckets=1024,32768") == [
        "max_vision_cuda_graph_seq_length=16384 of the recipe is dropped: vision_cuda_graph_buckets=1024,32768, "
        "as written, reaches beyond it"
    ]
    assert graph_options(config, "vision_cuda_graph_buckets=1024,16384").vision.max_seq_length == 16384


def test_a_limit_of_the_user_drops_a_recipes_larger_buckets():
    config = recipe(**VISION, vision_cuda_graph_buckets=[1024, 2304, 16384])
    found = graph_options(config, "max_vision_cuda_graph_seq_length=4096")
    assert (found.vision.buckets, found.vision.max_seq_length) == ((1024, 2304), 4096)
    assert dropped(config, "max_vision_cuda_graph_seq_length=4096") == [
        "vision_cuda_graph_buckets=16384 of the recipe is dropped: max_vision_cuda_graph_seq_length=4096, as written, "
        "is smaller"
    ]
    assert graph_options(config, "max_vision_cuda_graph_seq_length=64").vision.buckets == "auto"
