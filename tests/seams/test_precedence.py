"""A user's graph options over a recipe's, by every way that they reach a configuration of Bridge."""

import importlib
import json

import pytest
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.utils import omegaconf_utils

from bridge_cg_plugin.options import (
    GraphOptionWarning,
    LanguageModelGraphOptions,
    OptionError,
    graph_options,
    normalize,
)
from bridge_cg_plugin.options.graph_options import SETTING
from bridge_cg_plugin.options.language_model import IMPL, MODULES, SCOPE
from bridge_cg_plugin.upstream.hooks.graph_fields import apply_options
from bridge_cg_plugin.upstream.hooks.overrides import apply_overrides
from bridge_cg_plugin.upstream.hooks.training_config import check_training_config
from examples.photographs.training import Run, training_config

FULL = LanguageModelGraphOptions(impl="full_iteration")


@pytest.fixture
def recipe(active):
    """A configuration of a language model, without graphs."""
    config = training_config(Run())
    config.model = GPTModelProvider(num_layers=2, hidden_size=64, num_attention_heads=2, vocab_size=128)
    config.rng.te_rng_tracker = config.model.use_te_rng_tracker = False
    config.rerun_state_machine.check_for_nan_in_loss = True
    return config


@pytest.fixture
def with_modules(recipe):
    apply_options(graph_options("cuda_graph_impl=transformer_engine cuda_graph_modules=attn,mlp"), recipe)
    return recipe


def by_flags(config, name, value, tmp_path):
    apply_overrides(config, {name: value})


def by_words(config, name, value, tmp_path):
    apply_overrides(config, {}, [f"model.{name}={value}"])


def by_bridges_words(config, name, value, tmp_path, more=()):
    omegaconf_utils.process_config_with_overrides(
        config, cli_overrides=[f"model.{name}={value}", "train.train_iters=5", *more]
    )


def by_bridges_yaml(config, name, value, tmp_path, more=()):
    path = tmp_path / "overrides.yaml"
    path.write_text(f"model:\n  {name}: {value}\ntrain:\n  train_iters: 5\n")
    omegaconf_utils.process_config_with_overrides(config, config_filepath=str(path), cli_overrides=list(more))


WAYS = (by_flags, by_words, by_bridges_words, by_bridges_yaml)
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
FULL_BOTH = pytest.mark.parametrize("name", [IMPL, SCOPE])


def in_own_words(model):
    """Return what the model says of full iteration, in the words of the installed release."""
    return model.cuda_graph_impl, list(model.cuda_graph_modules)


def check_full_iteration(config):
    assert in_own_words(config.model) == ("full_iteration", [])
    assert normalize(config)[0].language_model == FULL
    assert config.rng.te_rng_tracker is True and config.model.use_te_rng_tracker is True
    assert config.rerun_state_machine.check_for_nan_in_loss is False


@every_way
@FULL_BOTH
def test_full_iteration_over_a_recipe_with_modules(with_modules, way, name, tmp_path):
    way(with_modules, name, "full_iteration", tmp_path)
    check_full_iteration(with_modules)


def test_what_is_dropped_is_announced_once(with_modules, monkeypatch):
    monkeypatch.setattr(importlib.import_module("bridge_cg_plugin.options.normalization"), "_warned", set())
    with pytest.warns(GraphOptionWarning, match=f"{MODULES}=attn,mlp of the recipe is dropped: {IMPL}=full") as caught:
        apply_overrides(with_modules, {IMPL: "full_iteration"})
    assert len(caught) == 1


def test_bridges_words_and_flags_of_one_command_line_are_one_persons(with_modules):
    words = [f"model.{IMPL}=transformer_engine", f"--{SCOPE}", "full_iteration"]
    with pytest.raises(OptionError, match=f"{IMPL}=transformer_engine"):
        omegaconf_utils.process_config_with_overrides(with_modules, cli_overrides=words)


# What Bridge makes of its own overrides


@pytest.fixture
def with_buckets(active):
    """A configuration with vision buckets, whose dataset has a length that nothing else has."""
    config = training_config(Run(impl="transformer_engine"))
    config.model.vision_cuda_graph_buckets, config.model.max_vision_cuda_graph_seq_length = [64, 1024, 4096], None
    config.dataset.seq_length = 1024
    return config


@pytest.mark.parametrize("flags", [[], ["--vision_cuda_graph_slots", "2"]], ids=["alone", "with_flags"])
@pytest.mark.parametrize("way", [by_bridges_words, by_bridges_yaml], ids=lambda w: w.__name__)
def test_an_interpolation_means_what_bridge_makes_of_it(with_buckets, way, flags, tmp_path):
    way(with_buckets, "max_vision_cuda_graph_seq_length", "${dataset.seq_length}", tmp_path, flags)
    vision = normalize(with_buckets)[0].vision
    assert (vision.buckets, vision.max_seq_length) == ((64, 1024), 1024)
    assert vision.slots == (2 if flags else "auto")


def test_a_saved_model_in_bridges_yaml_is_a_recipe(with_modules, tmp_path):
    """What it holds was not written by a person, so a flag beside it wins."""
    kind = type(with_modules.model)
    path = tmp_path / "saved.yaml"
    path.write_text(
        f"model:\n  _target_: {kind.__module__}.{kind.__qualname__}\n  num_layers: 2\n  hidden_size: 64\n"
        f"  num_attention_heads: 2\n  cuda_graph_impl: transformer_engine\n  {MODULES}: [mlp]\n"
    )
    omegaconf_utils.process_config_with_overrides(with_modules, str(path), [f"--{IMPL}", "full_iteration"])
    check_full_iteration(with_modules)


@pytest.mark.parametrize(
    "word, file, said",
    [
        ("++model.vision_cuda_graph_tuning.kernels=exact", "", "the option has gone"),
        ("+model.vision_cuda_graph_buckets_max_gb=2", "", "the option has gone"),
        ("model.offload=[mlp]", "", "the option has gone"),
        ("vision_cuda_graph_balance=true", "", "the option has gone"),
        ("train.train_iters=5", "vision_cuda_graph_tuning: {kernels: exact}", "the option has gone"),
        ("++model.vision_cuda_graph_evaluation=true", "", "no such option"),
    ],
)
def test_bridges_overrides_refuse_what_is_no_option(recipe, tmp_path, word, file, said):
    path = tmp_path / "overrides.yaml"
    path.write_text(f"model: {{{file}}}")
    with pytest.raises(OptionError, match=said):
        omegaconf_utils.process_config_with_overrides(recipe, str(path), [word])


# What graphs switch on and off beside themselves


def with_a_flag_and_words(config, settings, tmp_path):
    words = {IMPL: "full_iteration"}, [f"{name}={str(value).lower()}" for name, value in settings.items()]
    apply_overrides(config, *words)


def with_yaml(config, settings, tmp_path):
    sections = {"model": {IMPL: "full_iteration"}}
    for place, value in settings.items():
        section, name = place.split(".")
        sections.setdefault(section, {})[name] = value
    path = tmp_path / "overrides.yaml"
    path.write_text(json.dumps(sections))
    omegaconf_utils.process_config_with_overrides(config, config_filepath=str(path))


every_writing = pytest.mark.parametrize("write", [with_a_flag_and_words, with_yaml], ids=lambda w: w.__name__)
NAN_CHECK, TRACKER = "rerun_state_machine.check_for_nan_in_loss", ("rng.te_rng_tracker", "model.use_te_rng_tracker")


@every_writing
@pytest.mark.parametrize(
    "settings, field", [({NAN_CHECK: True}, NAN_CHECK), (dict.fromkeys(TRACKER, False), TRACKER[0])], ids=["nan", "rng"]
)
def test_settings_of_the_users_own_that_graphs_cannot_have_are_refused(with_modules, write, settings, field, tmp_path):
    with pytest.raises(OptionError, match="full_iteration") as caught:
        write(with_modules, settings, tmp_path)
    assert caught.value.field == field
    for place, value in settings.items():
        section, name = place.split(".")
        assert getattr(getattr(with_modules, section), name) is value


@every_way
def test_a_written_none_keeps_a_part_eager_under_the_one_setting(recipe, way, tmp_path):
    recipe.model.cuda_graphs = "exact"
    way(recipe, IMPL, "none", tmp_path)
    check_training_config(recipe)
    assert not normalize(recipe)[0].language_model.enabled


@pytest.mark.parametrize("way", [by_bridges_words, by_bridges_yaml], ids=lambda w: w.__name__)
def test_the_one_setting_alone_waits_for_validation(recipe, way, tmp_path):
    way(recipe, SETTING, "exact", tmp_path)
    assert recipe.model.cuda_graphs == "exact" and recipe.model.cuda_graph_impl == "none"
    check_training_config(recipe)
    assert normalize(recipe)[0].language_model.enabled
