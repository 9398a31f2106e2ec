import re

import pytest
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import Qwen3VLModelProvider
from megatron.bridge.training.utils import omegaconf_utils

from bridge_cg_plugin.options import PROVIDER_FIELDS, SCOPE_FIELD, OptionError, VisionGraphOptions, vision_options
from bridge_cg_plugin.options.vision import VISION
from examples.photographs.training import Run, training_config

DEFAULTS = VISION.added

VALUES = {
    "impl": "transformer_engine",
    "scope": ["attn", "mlp"],
    "max_seq_length": 128,
    "buckets": [64, 128],
    "slots": 3,
    "max_frames": 8,
    "exact_below": 0,
    "kernels": "fast",
    "attention": "cudnn",
    "offload": ["attention", "mlp"],
    "recompute": ["gelu"],
    "offload_above_gb": 6.5,
    "strict": True,
    "deepstack_gradient_allreduce": True,
}
FIELDS = {PROVIDER_FIELDS[name]: value for name, value in VALUES.items()}
TYPED = {name: tuple(v) if isinstance(v, list) else v for name, v in VALUES.items()}
OPTIONS = VisionGraphOptions(**TYPED)


def test_the_values_cover_every_field():
    assert {*FIELDS, SCOPE_FIELD} == set(DEFAULTS), "give it a value in VALUES"
    assert all(DEFAULTS[name] != value for name, value in FIELDS.items())


@pytest.fixture
def config(active):
    return training_config(Run(impl="transformer_engine"))


@pytest.mark.parametrize("provider", [Qwen3VLModelProvider, GPTModelProvider])
def test_a_constructor_names_options_that_have_gone(active, provider):
    with pytest.raises(OptionError, match="has gone"):
        provider(num_layers=2, hidden_size=64, num_attention_heads=2, vision_cuda_graph_tuning={"slots": 2})


def test_bridges_overrides_reach_the_fields(config):
    words = [
        f"model.{name}={re.sub("[ ']", '', str(value)) if isinstance(value, list | dict) else value}"
        for name, value in FIELDS.items()
    ]
    assert vision_options(omegaconf_utils.process_config_with_overrides(config, cli_overrides=words).model) == OPTIONS
