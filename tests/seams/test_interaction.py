"""Others patch what the plugin patches."""

import functools
import sys
from types import ModuleType

import pytest

from .test_patches import made_up

NAME = "made_up_upstream"


@pytest.fixture
def module(monkeypatch):
    made = ModuleType(NAME)
    made.function = lambda value=0: ["upstream"]
    monkeypatch.setitem(sys.modules, NAME, made)
    return made


@pytest.fixture
def patch():
    return made_up("function", lambda old: lambda value=0: ["ours", *old(value)], module=NAME)


def wrap(module, polite=True):
    """Patch `function` as another plugin does; returns how it undoes that."""
    before = module.function

    def theirs(value=0):
        return ["theirs", *before(value)]

    module.function = functools.wraps(before)(theirs) if polite else theirs
    return lambda: setattr(module, "function", before)


@pytest.mark.parametrize("polite", [True, False])
def test_ours_below_theirs_undone_in_reverse_order(module, patch, polite):
    original = module.function
    patch.apply(module)
    undo = wrap(module, polite)
    assert module.function() == ["theirs", "ours", "upstream"]
    undo()
    patch.revert()
    assert module.function is original


def test_ours_below_theirs_and_off_first(module, patch):
    original = module.function
    patch.apply(module)
    undo = wrap(module)
    theirs = module.function
    patch.look()
    assert patch.state == "active" and "wrap.<locals>.theirs" in patch.reason
    patch.revert()
    assert module.function is theirs, "their wrapper is not the plugin's to take off"
    assert module.function() == ["theirs", "upstream"]
    assert patch.state == "off" and "calls pass through" in patch.reason
    patch.apply(module)
    assert module.function() == ["theirs", "ours", "upstream"] and module.function is theirs
    patch.revert()
    undo()  # they put back what they found: the plugin's replacement, which passes through
    assert module.function() == ["upstream"]
    patch.revert()
    assert module.function is original


def test_a_replacement_that_calls_nobody_is_seen(module, patch):
    patch.apply(module)
    module.function = theirs = lambda value=0: ["theirs alone"]
    patch.look()
    assert patch.state == "broken"
    assert f"{NAME}.function" in patch.reason and "activate()" in patch.reason
    patch.apply(module)
    assert patch.state == "active"
    assert module.function() == ["ours", "theirs alone"]
    patch.revert()
    assert module.function is theirs
