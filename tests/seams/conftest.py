import importlib

import pytest

import bridge_cg_plugin
from bridge_cg_plugin import plugin


@pytest.fixture(scope="session")
def upstream():
    """Every patched module of upstream, imported, by name."""
    bridge_cg_plugin.activate()
    return {name: importlib.import_module(name) for name in plugin.PATCHED}


@pytest.fixture
def active(upstream):
    """The plugin is on during the test, and after it whatever the test did."""
    bridge_cg_plugin.activate()
    yield upstream
    bridge_cg_plugin.deactivate()
    bridge_cg_plugin.activate()
