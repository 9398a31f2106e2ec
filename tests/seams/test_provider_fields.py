import dataclasses
import importlib
import re

import pytest

import bridge_cg_plugin
from bridge_cg_plugin.options import PROVIDER_FIELDS, SCOPE_FIELD, VisionGraphOptions, vision_options
from bridge_cg_plugin.options.vision import VISION

DEFAULTS = VISION.added

MODULES = "megatron.bridge.models.qwen_vl"
CLASSES = [
    (f"{MODULES}.qwen3_vl_provider", "Qwen3VLModelProvider"),
    (f"{MODULES}.qwen3_vl_provider", "Qwen3VLMoEModelProvider"),
    (f"{MODULES}.qwen35_vl_provider", "Qwen35VLModelProvider"),
    (f"{MODULES}.qwen35_vl_provider", "Qwen35VLMoEModelProvider"),
    (f"{MODULES}.qwen25_vl_provider", "Qwen25VLModelProvider"),
    ("megatron.bridge.models.gemma_vl.gemma3_vl_provider", "Gemma3VLModelProvider"),
    ("megatron.bridge.models.glm_vl.glm_45v_provider", "GLM45VModelProvider"),
    ("megatron.bridge.models.ministral3.ministral3_provider", "Ministral3ModelProvider"),
    ("megatron.bridge.models.qwen_omni.qwen25_omni_provider", "Qwen25OmniModelProvider"),
    ("megatron.bridge.models.qwen_omni.qwen3_omni_provider", "Qwen3OmniModelProvider"),
]
VALUES = {
    "impl": "transformer_engine",
    "scope": ["attn", "mlp"],
    "max_seq_length": 128,
    "buckets": [64, 128],
    "slots": 3,
    "max_frames": 8,
    "buckets_max_gb": 2.5,
    "exact_below": 0,
    "kernels": "fast",
    "attention": "cudnn",
    "offload": ["attention", "mlp"],
    "recompute": ["gelu"],
    "offload_above_gb": 6.5,
    "strict": True,
    "check_interval": 7,
    "deepstack_gradient_allreduce": True,
}
TUNING = {one.name for one in VISION.tuned}
FIELDS = {PROVIDER_FIELDS[name]: value for name, value in VALUES.items() if name not in TUNING}
FIELDS["vision_cuda_graph_tuning"] = {name: value for name, value in VALUES.items() if name in TUNING}
TYPED = {name: tuple(v) if isinstance(v, list) else v for name, v in VALUES.items()}
OPTIONS = VisionGraphOptions(**TYPED)


@pytest.fixture(params=CLASSES, ids=lambda c: c[1])
def provider(request, active):
    module, name = request.param
    return getattr(importlib.import_module(module), name)


def test_the_values_cover_every_field():
    assert {*FIELDS, SCOPE_FIELD} == set(DEFAULTS) and VALUES.keys() >= TUNING
    assert all(DEFAULTS[name] != value for name, value in FIELDS.items())


def test_defaults_are_the_options_defaults(provider):
    made = provider()
    for name, default in DEFAULTS.items():
        found = getattr(made, name)
        assert (tuple(found) if isinstance(found, list) else found) == default, name
    assert vision_options(made) == VisionGraphOptions()


def test_an_unknown_keyword_is_still_refused(provider):
    with pytest.raises(TypeError, match="vision_cuda_graph_bukets"):
        provider(vision_cuda_graph_bukets=[64])


def test_fields_go_away_with_the_plugin(provider):
    bridge_cg_plugin.deactivate()
    names = {f.name for f in dataclasses.fields(provider)}
    added = [name for name in FIELDS if name not in names]
    assert "vision_cuda_graph_buckets" in added
    for name in added:
        with pytest.raises(TypeError, match=name):
            provider(**{name: FIELDS[name]})
        assert not hasattr(provider(), name)
    bridge_cg_plugin.activate()
    assert vision_options(provider(**FIELDS)) == OPTIONS


@pytest.fixture
def config(active):
    from examples.photographs.training import Run, training_config

    return training_config(Run(impl="transformer_engine"))


def test_bridges_overrides_reach_the_fields(config):
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    words = [
        f"model.{name}={re.sub("[ ']", '', str(value)) if isinstance(value, list | dict) else value}"
        for name, value in FIELDS.items()
    ]
    assert vision_options(process_config_with_overrides(config, cli_overrides=words).model) == OPTIONS
