"""The plugin's options in providers that Bridge, Python or a user rebuilds."""

import copy
import dataclasses
import gc
import importlib
import inspect
import pickle
import sys

import pytest
import yaml
from megatron.bridge.training.config import ConfigContainer, FinetuningDatasetConfig
from megatron.bridge.utils.instantiate_utils import InstantiationMode, instantiate
from megatron.bridge.utils.yaml_utils import safe_yaml_representers

import bridge_cg_plugin
from bridge_cg_plugin.options import PackedOptions, VisionGraphOptions, vision_options
from bridge_cg_plugin.options.packed import PACKED as PACKS
from bridge_cg_plugin.options.vision import VISION as VISION_GROUP
from bridge_cg_plugin.upstream.hooks.graph_fields import LANGUAGE_MODEL_DEFAULTS
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.registry.bridge import LANGUAGE_MODELS, PROVIDERS
from examples.photographs.training import Run, training_config
from tests.scripts import forked

from .test_provider_fields import FIELDS as VISION

PACKED = {
    "cuda_graph_max_packed_seqs": 64,
    "cuda_graph_packed_buckets": [1024, 4096],
    "cuda_graph_packed_offload": ["mlp"],
    "cuda_graph_packed_recompute": [],
    "cuda_graph_packed_offload_above_gb": 1e-5,
    "cuda_graph_packed_slots": 3,
    "cuda_graph_packed_gradient_accumulation_fusion": False,
    "cuda_graph_packed_strict": True,
    "cuda_graphs": "exact",
}
BRIDGE = "megatron.bridge.models"
DERIVED = (  # of providers that carry the options
    (f"{BRIDGE}.mla_provider", "MLAModelProvider"),
    (f"{BRIDGE}.mistral.mistral_provider", "MistralModelProvider"),
    (f"{BRIDGE}.gemma.gemma3_provider", "Gemma3ModelProvider"),
)
CARRIERS = (
    *((module, name, {**VISION, **PACKED}) for module, name in PROVIDERS),
    *((module, name, PACKED) for module, name, since in LANGUAGE_MODELS if since <= bridge_release()),
    *((module, name, PACKED) for module, name in DERIVED),
)
SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


# One of each kind, for what does not depend on a provider's own fields.
KINDS = (CARRIERS[0], *(one for one in CARRIERS if one[1] == "GPTModelProvider"), CARRIERS[-1])
every_kind = pytest.mark.parametrize("carrier", KINDS, ids=[one[1] for one in KINDS], indirect=True)


@pytest.fixture(params=CARRIERS, ids=lambda c: c[1])
def carrier(request, active):
    """A provider's class and every option that it carries, none with its default."""
    module, name, options = request.param
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        pytest.skip(f"this release has no {module}")
    if not hasattr(found, name):
        pytest.skip(f"this release has no {name}")
    return getattr(found, name), options


def as_dict(provider):
    """Return what Bridge saves of a provider, without what it leaves out when it reads a configuration again."""
    computed = {f.name for f in dataclasses.fields(provider) if not f.init}
    return {k: v for k, v in ConfigContainer._convert_value_to_dict(provider).items() if k not in computed}


def by_yaml(provider):
    with safe_yaml_representers():
        text = yaml.safe_dump(as_dict(provider))
    return instantiate(yaml.safe_load(text), mode=InstantiationMode.STRICT)


def by_pickle(provider):
    return pickle.loads(pickle.dumps(provider))


# Other ways are parts of these, or read fields as these do.
WAYS = (by_yaml, by_pickle, copy.deepcopy, dataclasses.replace)


def held(provider, options):
    return {name: getattr(provider, name) for name in options}


def test_the_values_cover_every_option():
    assert set(PACKED) == set(LANGUAGE_MODEL_DEFAULTS)
    assert all(LANGUAGE_MODEL_DEFAULTS[name] != value for name, value in PACKED.items())


def test_rebuilt_providers_keep_every_option(carrier, caplog):
    provider, options = carrier
    made = provider(**SIZES, **options)
    for rebuilt in WAYS:
        found = rebuilt(made)
        assert held(found, options) == options, rebuilt
        assert [type(v) for v in held(found, options).values()] == [type(v) for v in options.values()], rebuilt
        assert PACKS.read(found) == PACKS.read(made) != {}
        assert vision_options(found) == vision_options(made)
    assert "Dropping" not in caplog.text


def test_options_are_keywords_of_the_signature_while_the_plugin_is_on(carrier):
    provider, options = carrier
    parameters = inspect.signature(provider).parameters
    fields = {f.name: f for f in dataclasses.fields(provider)}
    for name in options:
        parameter = parameters[name]
        default = {**VISION_GROUP.added, **LANGUAGE_MODEL_DEFAULTS}[name]
        assert parameter.default == (default if default != () else parameter.default)
        assert fields[name].init and (fields[name].default == default or fields[name].default_factory() == [])
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY or name.startswith(("vision_cuda_graph_", "max_"))
    assert list(inspect.signature(provider.__init__).parameters)[1:] == list(parameters)
    assert set(parameters) == {f.name for f in fields.values() if f.init}
    with pytest.raises(TypeError, match="vision_cuda_graph_bukets"):
        provider(vision_cuda_graph_bukets=[64])
    assert vision_options(provider(**SIZES)) == VisionGraphOptions()


@every_kind
def test_options_go_away_with_the_plugin(carrier):
    provider, options = carrier
    bridge_cg_plugin.deactivate()
    added = options.keys() - {f.name for f in dataclasses.fields(provider)}
    made = provider(**SIZES)
    for name in added:
        assert not hasattr(made, name)
        with pytest.raises(TypeError, match=name):
            provider(**SIZES, **{name: options[name]})


def derived_from(provider):
    """Return dataclasses and a plain class, in a chain, in the provider's module, where Bridge finds them."""
    module = sys.modules[provider.__module__]
    early = dataclasses.make_dataclass("Early", [("extra", int, 1)], bases=(provider,), module=provider.__module__)
    plain = type("EarlyPlain", (early,), {"__module__": provider.__module__})
    last = dataclasses.make_dataclass("EarlyLast", [("last", int, 2)], bases=(plain,), module=provider.__module__)
    for made in (early, plain, last):
        setattr(module, made.__name__, made)
    return early, plain, last


@pytest.fixture
def derive(carrier):
    """`derived_from`, whose classes are gone after the test."""
    gc.freeze()  # the collection looks at nothing older
    yield derived_from
    for name in ("Early", "EarlyPlain", "EarlyLast"):
        vars(sys.modules[carrier[0].__module__]).pop(name, None)
    gc.collect()


@every_kind
def test_derived_providers_keep_every_option(carrier, derive):
    provider, options = carrier
    classes = derive(provider)
    for derived in classes:
        assert set(options) <= set(inspect.signature(derived).parameters)
        made = derived(**SIZES, extra=7, **options)
        for rebuilt in WAYS if derived is classes[-1] else (by_yaml, dataclasses.replace):
            found = rebuilt(made)
            assert type(found) is derived and found.extra == 7, rebuilt
            assert held(found, options) == options, rebuilt


@every_kind
def test_a_provider_made_before_the_plugin_has_the_defaults(carrier):
    provider, options = carrier
    bridge_cg_plugin.deactivate()
    made = provider(**SIZES)
    for name in options:  # those that Bridge's derived classes took over are as if made without the plugin too
        vars(made).pop(name, None)
    bridge_cg_plugin.activate()
    assert PackedOptions(**PACKS.read(made)) == PackedOptions() and vision_options(made) == VisionGraphOptions()
    for rebuilt in WAYS:
        found = rebuilt(made)
        assert PackedOptions(**PACKS.read(found)) == PackedOptions(), rebuilt
        assert vision_options(found) == VisionGraphOptions(), rebuilt


@pytest.fixture
def run(active):
    """A configuration of a run, with options that are not defaults."""
    config = training_config(Run(impl="transformer_engine"))
    config.dataset = FinetuningDatasetConfig(seq_length=1024)
    for name, value in {**VISION, **PACKED}.items():
        setattr(config.model, name, value)
    return config


def test_a_saved_run_comes_back(run, tmp_path):
    path = str(tmp_path / "run.yaml")
    run.to_yaml(path)
    for found in (ConfigContainer.from_yaml(path), ConfigContainer.from_dict(run.to_dict()), copy.deepcopy(run)):
        assert held(found.model, {**VISION, **PACKED}) == {**VISION, **PACKED}


def test_without_the_plugin_bridge_drops_the_options_or_refuses_them(run, tmp_path):
    """docs/options.md says so."""
    run.to_yaml(str(tmp_path / "run.yaml"))
    out = forked(
        f"""
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.utils.instantiate_utils import InstantiationMode
path = {str(tmp_path / "run.yaml")!r}
print(hasattr(ConfigContainer.from_yaml(path).model, "vision_cuda_graph_buckets"))
try:
    ConfigContainer.from_yaml(path, mode=InstantiationMode.STRICT)
except Exception as error:
    print(type(error).__name__, "vision_cuda_graph_buckets" in str(error))
"""
    )
    assert [line for line in out.splitlines() if line in ("True", "False")] == ["False"]
    assert out.splitlines()[-1] == "InstantiationException True"
    assert "Dropping unexpected config keys" in out and "vision_cuda_graph_buckets" in out
