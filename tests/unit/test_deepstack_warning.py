"""The warning of gradients that upstream gets wrong: Qwen3-VL's encoder under tensor and sequence parallelism."""

import re
from types import SimpleNamespace

import pytest

from bridge_cg_plugin.options import graph_options
from bridge_cg_plugin.options.normalization import _warned

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


@pytest.mark.parametrize("make", [config, experts])
def test_what_the_warning_names_takes_it_away(make):
    (text,) = warned(make())
    told = re.search(r"Write (\S+);", text)[1]
    assert warned(make(), [told]) == warned(make(), [f"model.{told}"]) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"vision_cuda_graph_impl": "none"},
        {"tensor_model_parallel_size": 1},
        {"tensor_model_parallel_size": None},
        {"sequence_parallel": None},
        {"vision_config": SimpleNamespace(deepstack_visual_indexes=[])},
        {"vision_config": SimpleNamespace()},  # Qwen3.5-VL's has no such field
        {"freeze_vision_model": True, "freeze_vision_projection": True},
    ],
    ids=str,
)
def test_each_condition_alone_takes_it_away(change):
    assert len(warned(config())) == 1
    assert warned(config(**change)) == ()


def test_adapters_are_in_the_encoder_too_whatever_is_frozen():
    assert len(warned(adapters(freeze_vision_model=True, freeze_vision_projection=True))) == 1
    assert warned(adapters(["language_model.*.linear_qkv"])) == warned(adapters(None)) == ()
