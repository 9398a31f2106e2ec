"""The presets beside Bridge's own recipes: built, validated, compared by field, looked up by name, documented."""

import importlib
import inspect
import os
import pickle
import re
import warnings
from enum import Enum
from pathlib import Path
from types import FunctionType
from unittest import mock

import pytest

import bridge_cg_plugin
from bridge_cg_plugin import recipes
from bridge_cg_plugin.options import GraphOptionWarning, OptionError, normalize, vision_options
from bridge_cg_plugin.options.explain import in_words
from bridge_cg_plugin.options.normalization import _warned
from bridge_cg_plugin.recipes import GPUS, PRESETS, RECIPES
from bridge_cg_plugin.upstream.hooks import recipe_names
from bridge_cg_plugin.upstream.seams.patches import bridge_release

BRIDGE = "megatron.bridge.recipes"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
GRAPH_FIELDS = {
    "model.vision_cuda_graph_impl",
    "model.max_vision_cuda_graph_seq_length",
    "model.vision_cuda_graph_buckets_max_gb",
    "model.use_te_rng_tracker",
    "rng.te_rng_tracker",
}
RECOMPUTE_FIELDS = {
    f"model.recompute_{name}" for name in ("granularity", "method", "num_layers", "modules", "modules[0]")
}
# Of these Bridge's own recipes have sequence parallelism and train the encoder or its mergers with wrong gradients.
SUMMED = {
    f"{model}_vision_graphs_{gpu}_{variant}_config"
    for model, variant in [
        ("qwen3_vl_30b_a3b", "pretrain_mock"),
        ("qwen3_vl_235b_a22b", "pretrain_mock"),
        ("qwen3_vl_235b_a22b", "sft"),
        ("qwen3_vl_235b_a22b", "sft_mock"),
    ]
    for gpu in ("h100", "h200", "b200")
}
# Bridge's own recipes of these are refused by Bridge: the batch does not divide among the GPUs of the recipe's name.
INDIVISIBLE = {
    "qwen35_vl_122b_a10b_sft_config",
    "qwen35_vl_122b_a10b_peft_config",
    "qwen35_vl_397b_a17b_sft_config",
    "qwen35_vl_397b_a17b_peft_config",
}
TASKS = {"pretrain": "pretrain", "sft": "sft", "sft_packed": "sft", "peft": "peft"}
STEPS = ("qwen3_vl_", "qwen35_vl_")

pytestmark = pytest.mark.skipif(
    not recipe_names.PATCHES[0].seam.expected_in(bridge_release()),
    reason="the presets derive from recipes of a later megatron-bridge",
)

every_preset = pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.name)
every_h200_preset = pytest.mark.parametrize("preset", [p for p in PRESETS if p.gpu == "h200"], ids=lambda p: p.name)


def flat(value, path="", into=None):
    """Every leaf of a configuration by its path, and the type of every object in it."""
    into = {} if into is None else into
    if isinstance(value, dict):
        parts = {f"{path}.{key}".lstrip("."): item for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        into[path] = f"{type(value).__name__} of {len(value)}"
        parts = {f"{path}[{i}]": item for i, item in enumerate(value)}
    elif hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType, Enum)):
        into[path] = type(value)
        parts = {f"{path}.{key}".lstrip("."): item for key, item in vars(value).items()}
    else:
        into[path] = value
        return into
    for name, item in parts.items():
        flat(item, name, into)
    return into


def changed(before, after):
    """Paths whose leaves differ; what is in one only counts."""
    before, after = flat(before), flat(after)
    absent = object()
    return {path for path in {*before, *after} if before.get(path, absent) != after.get(path, absent)}


def gpus_of(bridge, base):
    """How many GPUs Bridge lays a recipe out for: its full name says so."""
    return int(re.search(r"_(\d+)gpu_", getattr(bridge, base).__name__)[1])


def launched(config, gpus):
    """Do what Bridge does with a configuration before it initializes anything; ends with `validate`."""
    from megatron.bridge.training import config as training_config

    if config.peft is not None:
        config.checkpoint.pretrained_checkpoint = os.getcwd()
    # Not the environment: a process group that another test made would count instead.
    with mock.patch.object(training_config, "get_world_size_safe", lambda: gpus):
        training_config.runtime_config_update(config)


def test_the_presets_are_these():
    assert {p.gpu for p in PRESETS} == {"h100", "h200", "b200"}
    assert {(p.model, p.task, p.mock) for p in PRESETS if p.model == "qwen3_vl_8b"} == {
        ("qwen3_vl_8b", task, mocked)
        for task, mocked in [
            ("pretrain", True),
            *((task, mocked) for task in ("sft", "sft_packed", "peft") for mocked in (False, True)),
        ]
    }
    others = ["qwen3_vl_30b_a3b", "qwen3_vl_235b_a22b"]
    others += [f"qwen35_vl_{size}" for size in ("9b", "35b_a3b", "122b_a10b", "397b_a17b")]
    for model in others:
        assert sum(p.model == model for p in PRESETS) == 15, model
    assert len(PRESETS) == len(RECIPES) == 3 * (7 + 5 * len(others))


@every_preset
def test_it_differs_from_bridges_recipe_in_graph_fields_only(bridge, preset):
    before, after = getattr(bridge, preset.base)(), getattr(bridge, preset.name)()
    allowed = GRAPH_FIELDS | ({"model.vision_deepstack_gradient_allreduce"} if preset.name in SUMMED else set())
    if before.model.recompute_granularity == "full":
        allowed |= RECOMPUTE_FIELDS
    differing = changed(before, after)
    if preset.replaces_data:
        differing = {path for path in differing if path != "dataset" and not path.startswith("dataset.")}
    assert differing == allowed


def test_the_comparison_sees_any_change(bridge):
    def other(change):
        config = bridge.qwen3_vl_8b_sft_config()
        change(config)
        return changed(bridge.qwen3_vl_8b_sft_config(), config)

    assert other(lambda c: None) == set()
    assert other(lambda c: setattr(c.train, "micro_batch_size", 3)) == {"train.micro_batch_size"}
    assert other(lambda c: setattr(c.model.vision_config, "depth", 3)) == {"model.vision_config.depth"}
    assert other(lambda c: setattr(c.model, "nobody_knows", None)) == {"model.nobody_knows"}
    assert other(lambda c: c.env_vars.update(A=1)) == {"env_vars.A"}
    assert "ddp" in other(lambda c: setattr(c, "ddp", c.rng))


@every_preset
def test_it_validates_as_a_launch_would(bridge, preset):
    gpus, config = gpus_of(bridge, preset.base), getattr(bridge, preset.name)()
    model = config.model
    shards = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    if preset.base in INDIVISIBLE:
        config.train.global_batch_size = gpus // shards * config.train.micro_batch_size
    launched(config, gpus)
    assert config.data_parallel_size * shards == gpus


@pytest.mark.parametrize("base", sorted({p.base for p in PRESETS}))
def test_bridges_own_recipe_validates_except_the_documented(bridge, base):
    config, gpus = getattr(bridge, base)(), gpus_of(bridge, base)
    if base not in INDIVISIBLE:
        launched(config, gpus)
        return
    with pytest.raises(AssertionError, match="must be divisible by"):
        launched(config, gpus)


def test_validation_includes_the_plugins(bridge):
    config = bridge.qwen3_vl_8b_vision_graphs_h200_sft_config()
    config.model.recompute_granularity = "full"
    with pytest.raises(OptionError, match="recompute_granularity"):
        launched(config, 2)


@every_preset
def test_its_options_resolve(bridge, preset):
    config = getattr(bridge, preset.name)()
    options, gpu = vision_options(config.model), GPUS[preset.gpu]
    assert options.enabled and options.whole_encoder
    assert options.max_seq_length == gpu.max_seq_length
    assert options.buckets == options.slots == "auto"
    assert options.memory_gb * config.model.pipeline_model_parallel_size == pytest.approx(gpu.memory_gb, abs=0.1)
    assert config.rng.te_rng_tracker and config.model.use_te_rng_tracker


@every_preset
def test_it_is_explained(bridge, preset):
    said = in_words(normalize(getattr(bridge, preset.name)())[0])
    longest = GPUS[preset.gpu].max_seq_length
    assert (
        f"one graph per bucket over the whole encoder; buckets chosen from what warm-up steps show, up to {longest}"
        in said
    )
    assert "language model: no graphs" in said and "packed sequences: no graphs" in said
    assert ("vision_deepstack_gradient_allreduce=True" in said) == (preset.name in SUMMED)
    assert "warning: " not in said


def test_without_the_option_its_presets_say_that_gradients_are_wrong(bridge):
    off = "model.vision_deepstack_gradient_allreduce=false"
    found = {name: normalize(getattr(bridge, name)(), off)[0].warnings for name in RECIPES}
    assert {name for name, warnings in found.items() if warnings} == SUMMED
    assert all("with mixture of experts" in text for name in SUMMED for text in found[name])
    assert not any(name.startswith(("qwen3_vl_8b", "qwen35_vl_")) for name in SUMMED)


@pytest.mark.parametrize("allreduce", [True, False])
@pytest.mark.parametrize("name", [name for name in sorted(SUMMED) if "_h200_" in name])
def test_a_launch_without_the_option_warns_of_wrong_gradients_and_bridge_then_divides_sequences(
    bridge, name, allreduce
):
    config = getattr(bridge, name)()
    config.model.vision_deepstack_gradient_allreduce = allreduce
    _warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        launched(config, gpus_of(bridge, name.replace("_vision_graphs_h200", "").replace("sft_mock", "sft")))
    assert config.model.sequence_parallel
    given = [str(w.message) for w in caught if issubclass(w.category, GraphOptionWarning)]
    assert len(given) == (not allreduce) and all("wrong gradients" in text for text in given)


@every_h200_preset
def test_the_environment_it_sets_lets_graphs_be_captured(bridge, preset):
    variables = getattr(bridge, preset.name)().env_vars
    if "expandable_segments:True" in variables.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        assert str(variables["NCCL_GRAPH_REGISTER"]) == "0"


@every_h200_preset
def test_the_language_model_has_no_graphs(bridge, preset):
    """They are an option of their own, whose memory nobody measured for these models."""
    assert getattr(bridge, preset.name)().model.cuda_graph_impl == "none"


@pytest.mark.parametrize("name", [p.name for p in PRESETS if p.task == "sft_packed"])
def test_packed_presets_pack(bridge, name):
    dataset = getattr(bridge, name)().dataset
    assert dataset.enable_in_batch_packing and dataset.defer_in_batch_packing_to_step


def test_packed_presets_pack_even_if_bridges_recipe_would_not(bridge, monkeypatch):
    plain = bridge.qwen3_vl_8b_sft_config

    def unpacked():
        config = plain()
        config.dataset.enable_in_batch_packing = False
        return config

    monkeypatch.setattr(bridge, "qwen3_vl_8b_sft_config", unpacked)
    assert bridge.qwen3_vl_8b_vision_graphs_h100_sft_packed_config().dataset.enable_in_batch_packing
    assert not bridge.qwen3_vl_8b_vision_graphs_h100_sft_config().dataset.enable_in_batch_packing


@every_h200_preset
def test_recompute_spares_the_encoder_and_keeps_the_experts(bridge, preset):
    before, model = getattr(bridge, preset.base)().model, getattr(bridge, preset.name)().model
    if before.recompute_granularity != "full":
        assert model.recompute_granularity is None and before.recompute_granularity is None
        return
    assert model.num_moe_experts
    assert (model.recompute_granularity, model.recompute_modules) == ("selective", ["moe"])


@pytest.mark.parametrize("preset", [p for p in PRESETS if p.mock], ids=lambda p: p.name)
def test_mock_presets_have_bridges_mock_data(bridge, preset):
    from megatron.bridge.data.builders import MockVLMSFTDatasetConfig

    real, dataset = getattr(bridge, preset.base)().dataset, getattr(bridge, preset.name)().dataset
    assert type(dataset) is MockVLMSFTDatasetConfig
    for name in ("seq_length", "hf_processor_path", "num_workers", "enable_in_batch_packing"):
        assert getattr(dataset, name) == getattr(real, name), name


def test_presets_take_what_bridges_recipes_take(bridge):
    for preset in PRESETS:
        theirs = inspect.signature(getattr(bridge, preset.base)).parameters
        ours = inspect.signature(RECIPES[preset.name]).parameters
        assert {n: p.default for n, p in ours.items()} == {n: p.default for n, p in theirs.items()}, preset.name


def test_the_adapter_scheme_reaches_bridges_recipe(bridge):
    names = [
        type(bridge.qwen3_vl_8b_vision_graphs_h200_peft_config(peft_scheme=s).peft).__name__ for s in ("lora", "dora")
    ]
    assert names == ["LoRA", "DoRA"]


def test_bridges_launchers_find_presets(bridge):
    for package in (bridge, importlib.import_module(f"{BRIDGE}.qwen_vl")):
        assert set(RECIPES) <= set(dir(package))
        assert all(getattr(package, name) is recipe for name, recipe in RECIPES.items())


def test_a_name_says_what_bridges_launchers_read_from_it():
    """They choose the forward step by the name's beginning and the mode by one of these parts."""
    words = ("pretrain", "sft", "finetune", "dora", "peft", "lora")
    for preset in PRESETS:
        assert RECIPES[preset.name].__name__ == preset.name and preset.base in RECIPES[preset.name].__doc__
        assert preset.name.startswith(STEPS)
        assert [word for word in words if f"_{word}_" in preset.name] == [TASKS[preset.task]]


def test_a_model_and_a_mode_name_a_preset(bridge):
    """`run_recipe.py --model M --mode sft` looks for `M_sft_config`."""
    for mode in ("sft", "peft"):
        assert callable(getattr(bridge, f"qwen3_vl_30b_a3b_vision_graphs_b200_{mode}_config"))


def test_no_name_is_upstreams(bridge):
    bridge_cg_plugin.deactivate()
    perf = importlib.import_module("megatron.bridge.perf_recipes.qwen_vl")
    for package in (bridge, importlib.import_module(f"{BRIDGE}.qwen_vl"), perf):
        assert not set(RECIPES) & set(dir(package))


def test_the_names_go_away_with_the_plugin(active):
    packages = [active[patch.module] for patch in recipe_names.PATCHES]
    bridge_cg_plugin.deactivate()
    before = [list(vars(package).items()) for package in packages]
    for _ in range(3):
        bridge_cg_plugin.activate()
        assert all(set(RECIPES) <= set(vars(package)) for package in packages)
        bridge_cg_plugin.deactivate()
        for package, snapshot in zip(packages, before, strict=True):
            after = list(vars(package).items())
            assert [name for name, _ in after] == [name for name, _ in snapshot]
            assert all(now is then for (_, now), (_, then) in zip(after, snapshot, strict=True))


@pytest.mark.parametrize("patch", recipe_names.PATCHES, ids=lambda p: p.name)
def test_the_names_have_a_state(active, patch):
    assert bridge_cg_plugin.status()["patches"][patch.name] == {
        "state": "active",
        "reason": "",
        "purpose": patch.seam.purpose,
    }
    patch.apply(active[patch.module])
    patch.revert()
    patch.revert()
    assert patch.state == "off"


def test_a_preset_needs_the_plugin(bridge):
    recipe = bridge.qwen3_vl_8b_vision_graphs_h200_sft_config
    bridge_cg_plugin.deactivate()
    with pytest.raises(RuntimeError, match=r"activate\(\).*qwen3_vl_8b_sft_config"):
        recipe()


def test_presets_are_functions_of_their_package():
    for name, recipe in RECIPES.items():
        assert getattr(recipes, name) is recipe and name in recipes.__all__
        assert pickle.loads(pickle.dumps(recipe)) is recipe


def test_larger_gpus_allow_more():
    limits = [(GPUS[name].max_seq_length, GPUS[name].memory_gb) for name in ("h100", "h200", "b200")]
    assert limits == sorted(limits) and len(set(limits)) == 3


def test_the_memory_holds_the_largest_bucket():
    """By the line through the two largest measured slots, with the fifth that plans keep free."""
    per_token = (20.6 - 9.2) / (16384 - 6720)
    for gpu in GPUS.values():
        assert 9.2 + per_token * (gpu.max_seq_length - 6720) <= 0.8 * gpu.memory_gb + 0.05


def table(heading):
    """Rows of the first table below a heading of the documentation, without its header; code marks are dropped."""
    text = DOCS.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [tuple(cell.strip().replace("`", "") for cell in line.strip("|").split("|")) for line in lines[2:]]


def test_the_documented_presets_are_the_presets(bridge):
    expected = []
    for preset in (p for p in PRESETS if p.gpu == "h200"):
        before, after = getattr(bridge, preset.base)(), getattr(bridge, preset.name)()
        besides = ["mock data"] if preset.replaces_data else []
        if before.model.recompute_granularity != after.model.recompute_granularity:
            besides.append("recompute")
        if preset.base in INDIVISIBLE:
            besides.append("batch")
        name = preset.name.replace("h200", "GPU")
        stages = str(after.model.pipeline_model_parallel_size)
        expected.append((name, preset.base, str(gpus_of(bridge, preset.base)), stages, ", ".join(besides)))
    assert table("Presets") == expected


def test_the_documented_limits_are_the_limits():
    assert table("GPUs") == [(name, str(g.max_seq_length), f"{g.memory_gb:g}") for name, g in GPUS.items()]


def test_the_documented_fields_are_the_fields():
    documented = {row[0] for row in table("What a preset sets")}
    shown = {path for path in GRAPH_FIELDS | RECOMPUTE_FIELDS if not path.endswith("[0]")}
    others = {"dataset", "dataset.enable_in_batch_packing", "model.vision_deepstack_gradient_allreduce"}
    assert documented == shown | others


def test_the_documented_script_imports_what_there_is(active):
    script = DOCS.read_text().split("```python\n")[1].split("```")[0]
    imports = [line for line in script.splitlines() if line.startswith("from ")]
    assert len(imports) == 3
    exec("\n".join(imports), {})
