"""One setting for all graphs, and options of the environment, on the providers of the installed release."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_cg_plugin.options import OptionError, normalize
from bridge_cg_plugin.upstream.hooks import any_loop
from bridge_cg_plugin.upstream.hooks.graph_fields import apply_environment
from bridge_cg_plugin.upstream.hooks.overrides import resolve
from bridge_cg_plugin.upstream.hooks.training_config import check_training_config
from examples.photographs import training

from .test_features import QWEN3_VL, config_of


@pytest.mark.parametrize("how", ["exact", "fastest"])
def test_validation_sets_what_the_setting_comes_to(active, capsys, how):
    config = config_of(QWEN3_VL, cuda_graphs=how)
    config.rng.te_rng_tracker = config.model.use_te_rng_tracker = False
    config.rerun_state_machine.check_for_nan_in_loss = True
    check_training_config(config)
    options = normalize(config)[0]
    assert options.vision.enabled and options.vision.kernels == ("exact" if how == "exact" else "auto")
    assert options.language_model.impl == "full_iteration"
    assert config.rng.te_rng_tracker and not config.rerun_state_machine.check_for_nan_in_loss
    (line,) = capsys.readouterr().out.splitlines()
    parts = "vision encoder: the whole encoder; language model: all layers as one region"
    assert line == f"[bridge-cg] cuda_graphs={how}: {parts}"
    check_training_config(config)
    assert normalize(config)[0] == options and not capsys.readouterr().out


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID"])
def test_only_rank_0_prints_before_the_ranks_are_connected(active, capsys, monkeypatch, variable):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setenv(variable, "1")
    check_training_config(config_of(QWEN3_VL, cuda_graphs="exact"))
    assert not capsys.readouterr().out
    monkeypatch.setenv(variable, "0")
    check_training_config(config_of(QWEN3_VL, cuda_graphs="exact"))
    assert "vision encoder" in capsys.readouterr().out


VARIABLE = any_loop.OPTIONS
ON = "vision_cuda_graph_impl=transformer_engine"


@pytest.fixture
def configured(active):
    """Return a function that makes a configuration with eager modules, changed by fields of its model."""

    def make(**fields):
        config = training.training_config(training.Run(impl="none"))
        for name, value in fields.items():
            setattr(config.model, name, value)
        return config

    return make


def test_the_environment_switches_graphs_on_where_bridge_validates(configured, monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, f"{ON} vision_cuda_graph_buckets=64,128 vision_cuda_graph_slots=3")
    config = configured()
    config.model.use_te_rng_tracker = config.rng.te_rng_tracker = False
    check_training_config(config)
    vision = normalize(config)[0].vision
    assert (vision.enabled, vision.buckets, vision.slots) == (True, (64, 128), 3)
    assert config.rng.te_rng_tracker and config.model.use_te_rng_tracker
    assert f"[bridge-cg] {VARIABLE} sets vision_cuda_graph_impl=transformer_engine" in capsys.readouterr().out
    check_training_config(config)
    assert VARIABLE not in capsys.readouterr().out


@pytest.mark.parametrize("said", [ON, "cuda_graphs=fastest"])
def test_graphs_that_the_configuration_has_off_stay_off(configured, monkeypatch, said):
    monkeypatch.setenv(VARIABLE, said)
    config = configured(cuda_graphs="off")
    check_training_config(config)
    assert not normalize(config)[0].enabled


CHOICES = {
    "vision_cuda_graph_strict": (False, True),
    "max_vision_cuda_graph_seq_length": (None, 4096, 8192),
    "cuda_graph_warmup_steps": (3, 2, 5),
}
drawn = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in CHOICES.items()})


@settings(max_examples=25)
@given(explicit=drawn, said=drawn)
def test_each_field_is_the_configurations_or_else_the_environments(configured, explicit, said):
    words = " ".join(f"{name}={'null' if value is None else value}" for name, value in said.items())
    config = configured(**explicit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, f"{ON} {words}")
        apply_environment(config)
    for name, (default, *_) in CHOICES.items():
        own = explicit.get(name, default)
        assert getattr(config.model, name) == (own if own != default else said.get(name, default)), name


def test_a_command_line_sees_it_and_wins(configured, monkeypatch):
    monkeypatch.setenv(VARIABLE, f"{ON} vision_cuda_graph_buckets=64")
    assert resolve(configured(), {}).vision.buckets == (64,)
    assert resolve(configured(), {}, ["model.vision_cuda_graph_buckets=[128]"]).vision.buckets == (128,)


@pytest.mark.parametrize("said", ["vision_cuda_graph_imp=transformer_engine", f"{ON} vision_cuda_graph_buckets=63"])
def test_an_error_names_the_variable(configured, monkeypatch, said):
    monkeypatch.setenv(VARIABLE, said)
    with pytest.raises(OptionError) as refused:
        check_training_config(configured())
    assert VARIABLE in "".join(refused.value.__notes__)
