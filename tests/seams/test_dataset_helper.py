"""megatron-core's dataset helper: used as shipped from wheels, compiled by Bridge where its sources are."""

import importlib

import pytest

from bridge_cg_plugin.upstream.hooks.recipes import helper_as_shipped


@pytest.fixture
def initialize(active, monkeypatch):
    """Bridge's module, with calls of `make` noted instead of made."""
    module = importlib.import_module("megatron.bridge.training.initialize")
    made = []
    monkeypatch.setattr(module, "compile_helpers", lambda: made.append("make"))
    module.made = made
    yield module
    del module.made


def test_wheels_are_used_as_shipped(initialize):
    before = initialize.compile_helpers
    with helper_as_shipped():
        initialize.compile_helpers()
    assert initialize.made == [] and initialize.compile_helpers is before


def test_sources_are_compiled_as_ever(initialize, tmp_path, monkeypatch):
    from megatron.core import datasets

    (tmp_path / "Makefile").touch()
    monkeypatch.setattr(datasets, "__path__", [str(tmp_path)])
    with helper_as_shipped():
        initialize.compile_helpers()
    assert initialize.made == ["make"]
