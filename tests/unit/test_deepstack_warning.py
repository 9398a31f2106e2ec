"""The warning of gradients that upstream gets wrong: Qwen3-VL's encoder under tensor and sequence parallelism."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge_cg_plugin.cli.main import main
from bridge_cg_plugin.options import GraphOptionWarning, graph_options
from bridge_cg_plugin.options.explain import as_json, in_words
from bridge_cg_plugin.options.normalization import _warned
from bridge_cg_plugin.upstream.hooks import recipes

ROOT = Path(__file__).resolve().parents[2]
# What LoRA and DoRA take if nobody says otherwise.
LINEAR = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


def config(peft=None, **changes):
    """Return as much of a Bridge configuration of a dense Qwen3-VL as the warning depends on."""
    fields = {
        "vision_cuda_graph_impl": "transformer_engine",
        "cuda_graph_impl": "none",
        "use_te_rng_tracker": True,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "num_moe_experts": None,
        "freeze_language_model": False,
        "freeze_vision_model": False,
        "freeze_vision_projection": False,
        "vision_config": SimpleNamespace(deepstack_visual_indexes=[8, 16, 24]),
    }
    model = SimpleNamespace(**{**fields, **changes})
    return SimpleNamespace(model=model, rng=SimpleNamespace(te_rng_tracker=True), peft=peft)


def experts(**changes):
    """Return one with mixture of experts, as Bridge's recipe of the 235B model says it."""
    return config(**{"num_moe_experts": 128, "sequence_parallel": False, **changes})


def adapters(targets=LINEAR, **changes):
    return config(SimpleNamespace(target_modules=targets), **changes)


def warned(*sources):
    _warned.clear()
    return graph_options(*sources).warnings


def test_the_warning_names_the_options_and_what_to_write():
    (text,) = warned(config())
    assert text.startswith("tensor_model_parallel_size=2 with sequence_parallel=true: ")
    assert "wrong gradients" in text and "eager and on graphs" in text
    assert "Write vision_deepstack_gradient_allreduce=true" in text


@pytest.mark.parametrize("make", [config, experts])
def test_what_the_warning_names_takes_it_away(make):
    (text,) = warned(make())
    told = re.search(r"Write (\S+);", text)[1]
    assert warned(make(), [told]) == warned(make(), [f"model.{told}"]) == ()
    assert warned(make(vision_deepstack_gradient_allreduce=True)) == ()
    assert len(warned(make(vision_deepstack_gradient_allreduce=False))) == 1


def test_where_to_read_is_a_heading():
    (text,) = warned(config())
    page, _, anchor = re.search(r"see (\S+)$", text)[1].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "change",
    [
        {"vision_cuda_graph_impl": "none"},
        {"tensor_model_parallel_size": 1},
        {"vision_config": SimpleNamespace(deepstack_visual_indexes=[])},
        {"vision_config": SimpleNamespace()},  # Qwen3.5-VL's has no such field
        {"freeze_vision_model": True, "freeze_vision_projection": True},
    ],
    ids=str,
)
def test_each_condition_alone_takes_it_away(change):
    assert len(warned(config())) == 1
    assert warned(config(**change)) == ()


@pytest.mark.parametrize("frozen", ["freeze_vision_model", "freeze_vision_projection"])
def test_what_is_left_of_encoder_and_mergers_is_trained(frozen):
    assert len(warned(config(**{frozen: True}))) == 1


@pytest.mark.parametrize(
    "unknown",
    ["tensor_model_parallel_size", "sequence_parallel", "vision_config"],
)
def test_what_is_unknown_warns_of_nothing(unknown):
    known = config()
    delattr(known.model, unknown)
    assert warned(known) == ()


def test_words_decide_last():
    assert warned(config(), "model.sequence_parallel=false") == ()
    assert len(warned(config(sequence_parallel=False), "model.sequence_parallel=true")) == 1
    assert warned(config(), "freeze_vision_model=true freeze_vision_projection=true") == ()
    assert warned(experts(), "tensor_model_parallel_size=1") == ()


def test_adapters_are_in_the_encoder_too_whatever_is_frozen():
    for frozen in (False, True):
        assert len(warned(adapters(freeze_vision_model=frozen, freeze_vision_projection=frozen))) == 1


@pytest.mark.parametrize("targets", [["language_model.*.linear_qkv"], None])
def test_adapters_that_nobody_knows_in_the_encoder_warn_of_nothing(targets):
    found = warned(adapters(targets))
    assert found == ()


def as_dataclass(value):
    """Return a namespace, and those in it, as dataclasses: what a recipe of Bridge returns."""
    if not isinstance(value, SimpleNamespace):
        return value
    fields = {name: as_dataclass(held) for name, held in vars(value).items()}
    return dataclasses.make_dataclass("Config", list(fields))(**fields)


def test_explain_prints_it(monkeypatch, capsys):
    def some_config():
        return as_dataclass(config())

    monkeypatch.setattr(recipes, "_modules", lambda: iter([SimpleNamespace(some_config=some_config)]))
    assert main(["explain", "some_config"]) == 0
    assert "\nwarning: tensor_model_parallel_size=2 with sequence_parallel=true" in capsys.readouterr().out
    assert main(["explain", "--json", "some_config"]) == 0
    (text,) = json.loads(capsys.readouterr().out)["warnings"]
    assert text == as_json(graph_options(config()))["warnings"][0] and text in in_words(graph_options(config()))
    assert main(["explain", "some_config", "model.sequence_parallel=false"]) == 0
    assert "warning" not in capsys.readouterr().out


def test_it_is_warned_of_once():
    _warned.clear()
    with pytest.warns(GraphOptionWarning, match="tensor_model_parallel_size=2") as caught:
        graph_options(config())
        graph_options(config())
    assert len(caught) == 1
