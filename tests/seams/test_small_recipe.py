"""The small preset: found by name, validated, and its data, without a hub, on every release."""

import importlib
import pickle
import socket
from types import SimpleNamespace

import pytest
import torch
from transformers.utils import hub

import bridge_cg_plugin
from bridge_cg_plugin import recipes
from bridge_cg_plugin.options import normalize, vision_options
from bridge_cg_plugin.recipes import SMALL_RECIPES

from .test_recipes import launched

NAME = "qwen3_vl_small_vision_graphs_pretrain_mock_config"


@pytest.fixture
def offline(active, monkeypatch):
    """Whatever asks for a file of a hub, or for a connection to another machine, fails."""

    def refuse(*args, **kwargs):
        raise AssertionError(f"asked for {args} {kwargs}")

    for name in ("cached_file", "cached_files"):
        monkeypatch.setattr(hub, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return importlib.import_module("megatron.bridge.recipes")


@pytest.fixture
def config(offline):
    return getattr(offline, NAME)()


def samples(config, count=12):
    context = SimpleNamespace(train_samples=count, valid_samples=0, test_samples=0)
    return config.dataset.build_datasets(context)[0]


def test_bridges_look_up_finds_it_by_name(offline):
    assert getattr(offline, NAME) is SMALL_RECIPES[NAME] is getattr(recipes, NAME)
    assert NAME in recipes.__all__ and pickle.loads(pickle.dumps(SMALL_RECIPES[NAME])) is SMALL_RECIPES[NAME]
    bridge_cg_plugin.deactivate()
    assert not hasattr(offline, NAME)
    with pytest.raises(RuntimeError, match=rf"{NAME} needs the plugin.*activate\(\)"):
        SMALL_RECIPES[NAME]()


@pytest.mark.parametrize("gpus", [1, 4])
def test_it_validates_as_a_launch_would(config, gpus, monkeypatch):
    properties = SimpleNamespace(major=9, minor=0, name="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    launched(config, gpus)
    assert config.data_parallel_size == gpus
    options = normalize(config)[0]
    assert options.vision.enabled and options.vision.kernels == "exact"
    assert options.language_model.impl == "full_iteration" and not options.packed.enabled
    assert not config.rerun_state_machine.check_for_nan_in_loss


def test_every_sample_fits_the_sequence_and_the_largest_bucket(config):
    data, model = samples(config, 40), config.model
    longest = vision_options(model).max_seq_length
    found = {int(data[i]["images"].grid.prod(-1).sum()) for i in range(len(data))}
    assert max(found) <= longest and len(found) >= 5
    largest = torch.tensor(config.dataset.sizes).prod(-1).max() // 256 * config.dataset.most_images
    assert longest == int(largest)
