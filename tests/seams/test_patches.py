import inspect
from dataclasses import replace
from types import ModuleType

import pytest

import bridge_cg_plugin
from bridge_cg_plugin.upstream import batches, provider_fields, qwen3_vl, train_loop, training_config
from bridge_cg_plugin.upstream.patches import Patch

GROUPS = (train_loop, training_config, batches, provider_fields, qwen3_vl)
PATCHES = [patch for group in GROUPS for patch in group.PATCHES]
ABSENT = object()
CYCLES = 20

every_patch = pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name)


def owner_of(patch, module):
    owner = module
    for part in patch.target.split(".")[:-1]:
        owner = getattr(owner, part)
    return owner


def raw(patch, module):
    return vars(owner_of(patch, module)).get(patch.target.rpartition(".")[2], ABSENT)


def fake_module(patch, value):
    """A module that looks like upstream's, with `value` at the patch's target."""
    module, path = ModuleType(patch.module), patch.target.split(".")
    owner = module
    for part in path[:-1]:
        setattr(owner, part, type(part, (), {}))
        owner = getattr(owner, part)
    if value is not ABSENT:
        setattr(owner, path[-1], value)
    return module


@every_patch
def test_every_patch_fits_the_installed_bridge(active, patch):
    assert patch.state in ("active", "native"), patch.reason
    assert bridge_cg_plugin.status()["patches"][patch.name]["state"] == patch.state
    assert patch.purpose


def test_names_are_distinct():
    assert len({p.name for p in PATCHES}) == len(PATCHES)


@every_patch
def test_apply_and_revert_leave_the_same_object(active, patch):
    module = active[patch.module]
    patch.revert()
    original = raw(patch, module)
    for _ in range(CYCLES):
        patch.apply(module)
        assert patch.state in ("active", "native")
        assert (raw(patch, module) is original) == (patch.state == "native")
        patch.revert()
        assert patch.state == "off"
        assert raw(patch, module) is original


@every_patch
def test_what_is_left_after_revert_is_upstreams(active, patch):
    patch.revert()
    value = raw(patch, active[patch.module])
    if inspect.isfunction(value):
        assert not value.__module__.startswith("bridge_cg_plugin")
        assert "bridge_cg_plugin" not in value.__code__.co_filename
    elif inspect.isclass(value):
        assert value.__module__.startswith("megatron.")


@every_patch
def test_applying_twice_is_applying_once(active, patch):
    module = active[patch.module]
    before = raw(patch, module)
    patch.apply(module)
    assert raw(patch, module) is before
    patch.revert()
    patch.revert()
    once = raw(patch, module)
    patch.apply(module)
    patch.revert()
    assert raw(patch, module) is once


@pytest.mark.parametrize("patch", [p for p in PATCHES if p.parameters], ids=lambda p: p.name)
def test_a_target_that_lost_a_parameter_is_left_alone(patch):
    for lost in patch.parameters:
        kept = [p for p in patch.parameters if p != lost]
        scope: dict = {}
        exec(f"def drifted({', '.join(kept)}): pass", scope)
        fresh, module = replace(patch), fake_module(patch, scope["drifted"])
        fresh.apply(module)
        assert fresh.state == "broken"
        assert lost in fresh.reason and patch.target in fresh.reason
        assert raw(patch, module) is scope["drifted"]
        fresh.revert()
        assert raw(patch, module) is scope["drifted"]


# Every class has some `__init__`.
@pytest.mark.parametrize("patch", [p for p in PATCHES if not p.target.endswith("__init__")], ids=lambda p: p.name)
def test_a_target_that_is_gone_is_left_alone(patch):
    fresh, module = replace(patch), fake_module(patch, ABSENT)
    fresh.apply(module)
    assert fresh.state == ("native" if patch.optional else "broken")
    assert fresh.reason
    assert raw(patch, module) is ABSENT
    fresh.revert()
    assert raw(patch, module) is ABSENT


def test_an_owner_that_is_gone():
    for optional, state in ((True, "native"), (False, "broken")):
        patch = Patch("p", "m", "Gone.method", lambda old: 1, "for a test", optional=optional)
        patch.apply(ModuleType("m"))
        assert patch.state == state


def test_an_inherited_attribute_is_absent_again_after_revert():
    class Base:
        def method(self):
            return "base"

    module = ModuleType("m")
    module.Derived = type("Derived", (Base,), {})
    patch = Patch("p", "m", "Derived.method", lambda old: lambda self: "patched " + old(self), "for a test")
    patch.apply(module)
    assert module.Derived().method() == "patched base"
    patch.revert()
    assert "method" not in vars(module.Derived)
    assert module.Derived().method() == "base"


def test_a_class_or_static_method_comes_back_as_it_was():
    class Owner:
        @staticmethod
        def method():
            return 1

    module = ModuleType("m")
    module.Owner, before = Owner, vars(Owner)["method"]
    patch = Patch("p", "m", "Owner.method", lambda old: staticmethod(lambda: old() + 1), "for a test")
    patch.apply(module)
    assert Owner.method() == 2
    patch.revert()
    assert vars(Owner)["method"] is before


def test_a_maker_that_raises_leaves_upstream_alone():
    module = ModuleType("m")
    module.function = before = lambda: 1
    patch = Patch("p", "m", "function", lambda old: 1 / 0, "for a test")
    with pytest.raises(ZeroDivisionError):
        patch.apply(module)
    assert module.function is before and patch.state == "off"


def test_deactivate_reverts_and_activate_applies_again(active):
    raws = {p.name: raw(p, active[p.module]) for p in PATCHES}
    bridge_cg_plugin.deactivate()
    status = bridge_cg_plugin.status()
    assert not status["active"] and {p["state"] for p in status["patches"].values()} == {"off"}
    for patch in PATCHES:
        assert raw(patch, active[patch.module]) is not raws[patch.name], patch.name
    bridge_cg_plugin.activate()
    assert all(p.state in ("active", "native") for p in PATCHES)
