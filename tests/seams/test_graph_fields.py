"""Options on the config objects of the release that comes first on the path, whichever of the supported ones it is."""

import importlib
import itertools
import warnings
from contextlib import nullcontext, suppress
from functools import cache
from types import SimpleNamespace

import pytest
from megatron.core.transformer import enums
from megatron.core.transformer.transformer_config import TransformerConfig

from bridge_cg_plugin.options import (
    CudaGraphModule,
    GraphOptions,
    LanguageModelGraphOptions,
    OptionError,
    PackedOptions,
    VisionGraphOptions,
    graph_options,
    normalize,
)
from bridge_cg_plugin.options.graph_options import GROUPS, LAST_WITH_LOCAL, TE_RNG, field_values
from bridge_cg_plugin.options.language_model import DEPRECATED
from bridge_cg_plugin.options.sources import FIELDS
from bridge_cg_plugin.upstream.environment import OPTIONS as VARIABLE
from bridge_cg_plugin.upstream.hooks.graph_fields import (
    apply_options,
    environment_options,
    graph_options_overridden,
    inference_graphs,
)
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.seam import minor

MODEL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "num_moe_experts": 4, "moe_layer_freq": [0, 1]}
ABSENT, IMPL = object(), "cuda_graph_impl"
FULL, INFERENCE, TE_IMPL = "full_iteration", "full_iteration_inference", "transformer_engine"


def core_config(**fields):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(**MODEL, **fields)


@pytest.fixture
def provider(active):
    module = importlib.import_module("megatron.bridge.models.qwen_vl.qwen3_vl_provider")
    return module.Qwen3VLModelProvider(
        num_layers=2, hidden_size=64, num_attention_heads=2, vocab_size=128, use_te_rng_tracker=False
    )


@pytest.fixture
def container(provider):
    config = importlib.import_module("megatron.bridge.training.config")
    return SimpleNamespace(model=provider, rng=config.RNGConfig())


OLD = enums.CudaGraphScope
NAMES = ["attn", "attn,mlp", "moe_router", "moe_router,moe_preprocess", "moe_preprocess", "mamba", "moe", "bogus"]
WORDS = ["", "full", "full,attn", "full_iteration", "full_iteration_inference", "attn,full_iteration_inference"]
SPELLED = [
    *NAMES,
    *WORDS,
    "full_iteration,full_iteration_inference",
    *([name.split(",") for name in NAMES + WORDS if name]),
    [],
    None,
    ["attn", "attn"],
    [OLD.attn, OLD.mlp],
    OLD.mlp,
    OLD.full_iteration,
    [OLD.full_iteration],
    [OLD.attn, OLD.full_iteration_inference],
    [enums.CudaGraphModule.attn, "mlp"],
    enums.CudaGraphModule.mlp,
    3,
]
INPUTS = [
    {name: value for name, value in fields.items() if value is not ABSENT}
    for impl, (field, spelled), scope, switches in itertools.product(
        [ABSENT, "none", "local", "transformer_engine", "full_iteration", "cuda"],
        [("cuda_graph_modules", ABSENT), *itertools.product(["cuda_graph_modules", "cuda_graph_scope"], SPELLED)],
        [ABSENT, None, "none", "layer", "block"],
        [{}, {"enable_cuda_graph": True}, {"external_cuda_graph": True}],
    )
    if not switches or scope in (ABSENT, "block")
    for fields in [{"cuda_graph_impl": impl, field: spelled, "inference_cuda_graph_scope": scope, **switches}]
]


def modules_of(fields):
    value = fields.get("cuda_graph_modules", fields.get("cuda_graph_scope"))
    items = value if isinstance(value, list) else [value]
    return [part for item in items for part in str(getattr(item, "name", item)).split(",")]


# What the listed corrections are by their inputs, and whether megatron-core accepts such an input.
CORRECTIONS = {
    "a switch beside impl none is refused": (True, lambda impl, named, on: impl == "none" and on),
    "full_iteration with impl none stays off": (True, lambda impl, named, on: impl == "none" and FULL in named),
    "the old scope without an implementation chooses one": (
        True,
        lambda impl, named, on: impl is None and not on and {FULL, INFERENCE} & set(named),
    ),
    "two old words at once are refused": (False, lambda impl, named, on: {FULL, INFERENCE} <= set(named)),
    "full_iteration_inference without impl local is refused": (
        False,
        lambda impl, named, on: INFERENCE in named and (impl == "transformer_engine" or on == "external_cuda_graph"),
    ),
    "a repeated module counts once": (True, lambda impl, named, on: len(set(named)) < len(named)),
}


def correction(fields):
    """Return which of the listed corrections an input is, if any."""
    switched = next((name for name in ("enable_cuda_graph", "external_cuda_graph") if name in fields), "")
    found = (fields.get("cuda_graph_impl"), modules_of(fields), switched)
    return next((name for name, (_, applies) in CORRECTIONS.items() if applies(*found)), None)


@cache
def accepted():
    made = []
    for fields in INPUTS:
        with suppress(AssertionError, ValueError, KeyError, TypeError, AttributeError):
            made.append((fields, core_config(**fields)))
    return made


def as_core_says(config):
    modules = [module.name for module in config.cuda_graph_modules]
    return config.cuda_graph_impl, modules, config.inference_cuda_graph_scope.name


UPSTREAMS = {*DEPRECATED, TE_RNG, *(one.field for group in GROUPS for one in group.options if one.upstreams)}


def as_we_say(fields):
    told = field_values(normalize(fields)[0], UPSTREAMS)
    return told["cuda_graph_impl"], told["cuda_graph_modules"], told["inference_cuda_graph_scope"]


def test_agreement_with_megatron_cores_own_normalization():
    compared = 0
    for fields, config in accepted():
        if correction(fields) is None:
            assert as_we_say(fields) == as_core_says(config), fields
            compared += 1
    assert compared > 300


def test_the_installed_release_has_upstreams_fields():
    # Bridge's provider has the tracker's field where megatron-core's config has none.
    assert {name for name in FIELDS if hasattr(core_config(), name)} == UPSTREAMS - {TE_RNG}


def test_the_last_release_that_trains_on_parts_of_local_layers(provider):
    refused = pytest.raises(OptionError, match="Use it, or megatron-bridge 0.5")
    with nullcontext() if minor(bridge_release()) == minor(LAST_WITH_LOCAL.split()[1]) else refused:
        apply_options(graph_options("cuda_graph_impl=local cuda_graph_modules=attn"), provider)


def te(*modules):
    return LanguageModelGraphOptions(impl="transformer_engine", modules=tuple(CudaGraphModule[m] for m in modules))


OPTIONS = [
    GraphOptions(),
    GraphOptions(language_model=te()),
    GraphOptions(language_model=te("attn", "mlp")),
    graph_options("cuda_graph_impl=full_iteration"),
    graph_options("cuda_graph_impl=local"),
    graph_options("cuda_graph_impl=local inference_cuda_graph_scope=block"),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_upstreams_own_steps_change_nothing_that_was_applied(options, provider):
    for config in (core_config(), provider):
        apply_options(options, config)
        assert normalize(config)[0] == options
        assert all(type(m) is enums.CudaGraphModule for m in config.cuda_graph_modules)
        assert type(config.inference_cuda_graph_scope) is enums.InferenceCudaGraphScope
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        provider.finalize()
    assert normalize(provider)[0] == options
    assert not [w for w in caught if "cuda_graph" in str(w.message) and "deprecated" in str(w.message)]


def test_vision_options_reach_the_provider(provider):
    vision = VisionGraphOptions(impl="transformer_engine", scope=("attn",), max_seq_length=4096, strict=True)
    apply_options(GraphOptions(vision=vision), provider)
    assert normalize(provider)[0].vision == vision
    assert provider.vision_cuda_graph_scope == ["attn"]
    with pytest.raises(OptionError, match="Qwen3-VL family"):
        apply_options(GraphOptions(vision=vision), core_config())


def test_a_refused_apply_sets_nothing(provider):
    before = dict(vars(provider))
    wrong = GraphOptions(language_model=te("moe"), packed=PackedOptions(max_packed_seqs=4))
    with pytest.raises(OptionError, match="moe"):
        apply_options(wrong, provider)
    assert vars(provider) == before


def test_an_override_restores_every_field_it_touched(container):
    apply_options(GraphOptions(language_model=te("attn")), container)
    del container.model.__dict__["cuda_graph_scope"]
    before = [dict(vars(container.model)), dict(vars(container.rng))]
    with pytest.raises(RuntimeError, match="rollout"), graph_options_overridden(container, f"{IMPL}=none") as options:
        assert not options.enabled
        assert container.model.cuda_graph_impl == "none"
        assert "cuda_graph_scope" in vars(container.model)
        raise RuntimeError("rollout")
    with pytest.raises(OptionError), graph_options_overridden(container, f"{IMPL}={FULL} cuda_graph_modules=attn"):
        pass
    assert [dict(vars(container.model)), dict(vars(container.rng))] == before


def test_the_environment_names_modules_of_a_finalized_config(monkeypatch):
    """Which has none, where upstream's default was the whole layer."""
    monkeypatch.setenv(VARIABLE, f"{IMPL}={TE_IMPL} cuda_graph_modules=attn")
    with environment_options(core_config()) as said:
        assert said["cuda_graph_modules"]


def inference_engine(config):
    """Return what the engine's constructor takes from the configuration, and nothing that a warm-up pass needs."""
    names = ("cuda_graph_impl", "inference_cuda_graph_scope", "cuda_graph_scope")
    return SimpleNamespace(**{name: getattr(config, name) for name in names if hasattr(config, name)})


def test_inference_with_full_iteration_makes_no_warm_up_passes():
    module = importlib.import_module("megatron.core.inference.engines.dynamic_engine")
    create = module.DynamicInferenceEngine.create_cuda_graphs
    config = core_config()
    apply_options(graph_options("cuda_graph_impl=full_iteration"), config)
    with inference_graphs(config) as options:
        assert not options.language_model.enabled
        assert create(inference_engine(config)) is None
    assert normalize(config)[0].language_model.impl == "full_iteration"


def test_every_field_of_upstream_is_known_or_not_ours(provider):
    """No field that upstream has is refused as a misspelled option."""
    for config in (core_config(), provider):
        names = {name for name in vars(config) if name not in FIELDS and isinstance(name, str)}
        normalize({"model": {name: None for name in names if not name.startswith("_")}})
