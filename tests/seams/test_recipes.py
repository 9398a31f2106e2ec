"""Graphs on Bridge's own recipes, and the presets: built, validated, compared by field, documented."""

import os
import re
from enum import Enum
from functools import partial
from pathlib import Path
from types import FunctionType
from unittest import mock

import pytest

from bridge_cg_plugin.options import OptionError, normalize, vision_options
from bridge_cg_plugin.options.explain import in_words
from bridge_cg_plugin.recipes import GPUS, PRESETS, with_graphs

from .conftest import with_presets

DOCS = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
GRAPH_FIELDS = {
    "model.cuda_graphs",
    "model.max_vision_cuda_graph_seq_length",
    "model.use_te_rng_tracker",
    "rng.te_rng_tracker",
}
MODELS = (
    "qwen3_vl_8b",
    "qwen3_vl_30b_a3b",
    "qwen3_vl_235b_a22b",
    "qwen35_vl_9b",
    "qwen35_vl_35b_a3b",
    "qwen35_vl_122b_a10b",
    "qwen35_vl_397b_a17b",
)
TASKS = ("pretrain_mock", "sft", "peft")
BASES = [f"{model}_{task}_config" for model in MODELS for task in TASKS]
# These have sequence parallelism and train the encoder or its mergers with wrong gradients.
SUMMED = {
    "qwen3_vl_30b_a3b_pretrain_mock_config",
    "qwen3_vl_235b_a22b_pretrain_mock_config",
    "qwen3_vl_235b_a22b_sft_config",
}
# Bridge's own recipes of these are refused by Bridge: the batch does not divide among the GPUs of the recipe's name.
INDIVISIBLE = {f"qwen35_vl_{size}_{task}_config" for size in ("122b_a10b", "397b_a17b") for task in ("sft", "peft")}
# Recipes of models without an encoder that can be on graphs.
TEXT_BASES = ("nemotron_3_nano_4b_sft_config", "qwen3_8b_sft_config")
PACKED_BASES = (*TEXT_BASES, "qwen3_vl_8b_sft_config")
OFFLINE_FIELDS = {"dataset.pad_to_max_length", "dataset.offline_packing_specs.pad_cu_seqlens"}
# What of a language model is on graphs, as `explain` and as docs/recipes.md call it.
LANGUAGE_MODEL = {
    "all layers as one region": "layers",
    "all layers as one region over packed sequences": "packs",
    "attention and routers over padded sequences": "routers",
    "attention and routers over packed sequences": "packs' attention",
    "attention, routers and preprocessing of experts": "routers",
    "attention": "attention",
    "eager": "eager",
}

pytestmark = with_presets

every_base = pytest.mark.parametrize("base", BASES)
every_packed_base = pytest.mark.parametrize("base", PACKED_BASES)
every_text_base = pytest.mark.parametrize("base", TEXT_BASES)


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


def parts_of(config):
    """Return what `cuda_graphs` comes to on a configuration, by part."""
    return {part.name: part for part in normalize(config)[0].chosen}


@every_base
def test_graphs_change_graph_fields_only_and_a_launch_takes_them(bridge, base):
    """The documented words say which parts; fields of graphs are written by a launch, which knows the configuration."""
    before, config = getattr(bridge, base)(), with_graphs(base, gpu="h200")
    allowed = GRAPH_FIELDS | ({"model.vision_deepstack_gradient_allreduce"} if base in SUMMED else set())
    assert changed(before, config) == allowed
    part = parts_of(config)["language model"]
    assert part.graphs in LANGUAGE_MODEL
    why = "multi-token prediction runs eager" if config.model.mtp_num_layers else ""
    assert (part.why == why) == (LANGUAGE_MODEL[part.graphs] in ("layers", "packs"))
    packs = getattr(config.dataset, "enable_in_batch_packing", False)
    assert part.graphs == "eager" or ("packed" in part.graphs) == packs
    check_what_is_explained(in_words(normalize(config)[0]), base)
    if "expandable_segments:True" in config.env_vars.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        assert str(config.env_vars["NCCL_GRAPH_REGISTER"]) == "0"
    gpus, model = gpus_of(bridge, base), config.model
    shards = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    if base in INDIVISIBLE:
        with pytest.raises(AssertionError, match="must be divisible by"):
            launched(before, gpus)
        config.train.global_batch_size = gpus // shards * config.train.micro_batch_size
    launched(config, gpus)
    assert config.data_parallel_size * shards == gpus


@every_text_base
def test_a_language_models_recipe_gets_no_fields_of_an_encoder(bridge, base):
    before, after = getattr(bridge, base)(), with_graphs(base, gpu="h200")
    assert changed(before, after) == {name for name in GRAPH_FIELDS if "vision" not in name}


def test_a_recipe_is_a_name_a_function_or_a_configuration(bridge):
    config = bridge.qwen3_vl_8b_sft_config()
    ways = with_graphs(config), with_graphs(bridge.qwen3_vl_8b_sft_config), with_graphs("qwen3_vl_8b_sft_config")
    assert ways[0] is config and all(changed(config, other) == set() for other in ways)
    assert type(with_graphs(partial(bridge.qwen3_vl_8b_peft_config, peft_scheme="dora")).peft).__name__ == "DoRA"


def test_further_options_win(bridge):
    words = "vision_cuda_graph_buckets=1024,2304 vision_cuda_graph_slots=2"
    for options in (words, words.split(), {"model": dict(word.split("=") for word in words.split())}):
        vision = vision_options(with_graphs("qwen3_vl_8b_sft_config", options=options).model)
        assert (vision.buckets, vision.slots, vision.max_seq_length) == ((1024, 2304), 2, 8192)


def test_a_part_that_options_switch_off_stays_off_and_the_other_is_on(bridge):
    config = with_graphs("qwen3_vl_8b_sft_config", options="cuda_graph_impl=none")
    launched(config, 2)
    options = normalize(config)[0]
    assert options.vision.enabled and not options.language_model.enabled and not options.packed.enabled
    config = bridge.qwen3_vl_8b_sft_config()
    config.model.recompute_granularity = "full"
    with_graphs(config, options={"vision_cuda_graph_impl": "none"})
    assert config.model.recompute_granularity == "full" and config.model.max_vision_cuda_graph_seq_length is None
    options = normalize(with_graphs("qwen3_vl_8b_sft_config", options={"vision_cuda_graph_impl": "none"}))[0]
    assert options.packed.enabled and not options.vision.enabled


def test_what_was_set_explicitly_stays(bridge):
    config = bridge.qwen3_vl_8b_sft_config()
    config.model.max_vision_cuda_graph_seq_length = 4096
    config.model.cuda_graph_max_packed_seqs = 3
    launched(with_graphs(config, gpu="h200"), 2)
    options = normalize(config)[0]
    assert options.vision.max_seq_length == 4096
    assert options.packed.max_packed_seqs == 3 and options.language_model.impl == "transformer_engine"


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"gpu": None}, "gpu=None: it must be h100 or h200 or b200"),
        ({"graphs": "quick"}, "graphs='quick': it must be exact or fastest or off"),
        ({"options": 5}, "options=5: it must be a mapping, words, YAML or GraphOptions"),
        ({"options": "vision_cuda_graph_strikt=true"}, "Did you mean vision_cuda_graph_strict"),
        ({"recipe": 5}, "recipe=5: it must be a name, a function or a ConfigContainer"),
        ({"recipe": dict}, "recipe='dict': it must be a function that returns a ConfigContainer"),
    ],
    ids=str,
)
def test_a_bad_argument_is_refused_and_says_what_to_write(bridge, arguments, says):
    with pytest.raises(OptionError, match="Cannot use") as refused:
        with_graphs(**{"recipe": "qwen3_vl_8b_sft_config", **arguments})
    assert says in str(refused.value)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.name)
def test_a_preset_puts_encoder_and_language_model_on_graphs_and_changes_nothing_else(bridge, preset):
    before, config = getattr(bridge, preset.base)(), getattr(bridge, preset.name)()
    gone = {f"model.{name}" for name, value in preset.fields.items() if value is None}
    assert changed(before, config) == (GRAPH_FIELDS | {f"model.{name}" for name in preset.fields}) - gone
    chosen = parts_of(config)
    assert chosen["vision encoder"].graphs == "the whole encoder" and chosen["language model"].graphs != "eager"
    launched(config, gpus_of(bridge, preset.base))
    options = normalize(config)[0]
    assert options.vision.enabled and options.vision.kernels == "exact" and config.model.cuda_graphs is None
    assert options.language_model.enabled and options.packed.enabled == config.dataset.enable_in_batch_packing


def check_what_is_explained(said, base):
    longest = GPUS["h200"]
    assert (
        f"one graph per bucket over the whole encoder; buckets chosen from what warm-up steps show, up to {longest}"
        in said
    )
    assert said.startswith("vision encoder: graphs; ") and "\nlanguage model: " in said
    assert said.count("cuda_graphs=exact") == 2
    assert ("vision_deepstack_gradient_allreduce=True" in said) == (base in SUMMED)
    assert "warning: " not in said


def table(heading):
    """Rows of the first table below a heading of the documentation, without its header; code marks are dropped."""
    text = DOCS.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [tuple(cell.strip().replace("`", "") for cell in line.strip("|").split("|")) for line in lines[2:]]


def test_the_documented_recipes_are_those_of_the_tests(bridge):
    assert table("Recipes") == [
        (model, *(summary(bridge, f"{model}_{task}_config") for task in TASKS)) for model in MODELS
    ]


def summary(bridge, base):
    """Return what the table says of a recipe: GPUs/pipeline stages, and what is special about it."""
    after = with_graphs(base)
    special = [LANGUAGE_MODEL[parts_of(after)["language model"].graphs]]
    special += ["deepstack"] if base in SUMMED else []
    special += ["batch"] if base in INDIVISIBLE else []
    return f"{gpus_of(bridge, base)}/{after.model.pipeline_model_parallel_size} {', '.join(special)}".strip()


def test_the_documented_presets_are_the_presets(bridge):
    graphs = {preset.name: parts_of(getattr(bridge, preset.name)())["language model"].graphs for preset in PRESETS}
    expected = [(p.name, p.base, p.gpu, LANGUAGE_MODEL[graphs[p.name]]) for p in PRESETS]
    assert [row[:4] for row in table("Presets")] == expected


def test_the_documented_limits_are_the_limits():
    assert table("GPUs") == [(name, str(tokens)) for name, tokens in GPUS.items()]


def test_the_documented_fields_are_the_fields():
    documented = {field for row in table("What is set") for field in row[0].split(", ")}
    assert documented == GRAPH_FIELDS | {"dataset", "model.vision_deepstack_gradient_allreduce"}


@every_packed_base
def test_a_launch_captures_packs_of_as_many_documents_as_warm_up_shows_padded_to_one_length(bridge, base):
    plain, config = getattr(bridge, base)(), with_graphs(base)
    for each in (plain, config):
        launched(each, gpus_of(bridge, base))
    options = normalize(config)[0]
    assert options.packed.max_packed_seqs == "auto" and not options.language_model.modules
    assert options.language_model.impl == "transformer_engine"
    assert config.rng.te_rng_tracker and config.model.use_te_rng_tracker
    offline = getattr(plain.dataset, "enable_offline_packing", False)
    assert OFFLINE_FIELDS.intersection(changed(plain, config)) == (OFFLINE_FIELDS if offline else set())
