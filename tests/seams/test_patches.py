import functools
import importlib
import inspect
import sys
from types import ModuleType

import pytest

import bridge_cg_plugin
from bridge_cg_plugin.upstream.hooks import graph_fields
from bridge_cg_plugin.upstream.seams import patches
from bridge_cg_plugin.upstream.seams.activation import PATCHING
from bridge_cg_plugin.upstream.seams.patches import Patch, bridge_release
from bridge_cg_plugin.upstream.seams.registry import SEAMS
from bridge_cg_plugin.upstream.seams.seam import Seam

from .conftest import is_importable

OURS = [importlib.import_module(f"bridge_cg_plugin.upstream.{name}") for name in PATCHING]
EVERY = [patch for module in OURS for patch in module.PATCHES]
PATCHES = [patch for patch in EVERY if isinstance(patch, Patch) and is_importable(patch.seam)]
ABSENT = object()
CYCLES = 20

every_patch = pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name)


def fresh(patch):
    return Patch(patch.seam, patch.make)


def made_up(target, make, module="m", kind="function", **changes):
    changes.setdefault("since", "0.5.1")
    return Patch(
        Seam(name="p", module=module, target=target, kind=kind, touch="patched", purpose="for a test", **changes), make
    )


def owner_of(patch, module):
    owner = module
    for part in patch.target.split(".")[:-1]:
        owner = getattr(owner, part, ABSENT)
    return owner


def raw(patch, module):
    owner = owner_of(patch, module)
    return ABSENT if owner is ABSENT else vars(owner).get(patch.target.rpartition(".")[2], ABSENT)


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


def callable_with(kind, parameters):
    """A function, or a class with a constructor, that takes these parameters."""
    scope: dict = {}
    exec(f"def drifted({', '.join(parameters)}): pass", scope)
    if kind == "function":
        return scope["drifted"]
    names = ("create_cudagraphs", "graphs_created", "cuda_graph_set_manual_hooks", "delete_cuda_graphs")
    return type("Drifted", (), {**dict.fromkeys(names, lambda self: None), "__init__": scope["drifted"]})


@every_patch
def test_every_patch_fits_the_installed_bridge(active, patch):
    assert patch.state in ("active", "native"), patch.reason
    assert bridge_cg_plugin.status()["patches"][patch.name]["state"] == patch.state


def test_every_patched_seam_has_one_patch():
    assert sorted(p.name for p in EVERY) == sorted(s.name for s in SEAMS if s.touch == "patched")
    assert all(patch.seam in SEAMS for patch in EVERY)


def test_twenty_times_on_and_off_leave_every_owner_as_it_was(active):
    bridge_cg_plugin.deactivate()
    for patch in PATCHES:
        check_upstreams(raw(patch, active[patch.module]))
    owners = {
        id(o): o for p in PATCHES for o in [owner_of(p, active[p.module])] if p.seam.expected_in(bridge_release())
    }
    before = {key: dict(vars(owner)) for key, owner in owners.items()}
    for _ in range(CYCLES):
        bridge_cg_plugin.activate()
        once = [raw(patch, active[patch.module]) for patch in PATCHES]
        for patch in PATCHES:
            patch.apply(active[patch.module])
        assert all(raw(patch, active[patch.module]) is made for patch, made in zip(PATCHES, once, strict=True))
        bridge_cg_plugin.deactivate()
        assert {patch.state for patch in PATCHES} <= {"off", "native"}
    for key, owner in owners.items():
        after = dict(vars(owner))
        assert list(after) == list(before[key]), owner
        assert [n for n in after if after[n] is not before[key][n]] == [], owner


def check_upstreams(value):
    if inspect.isfunction(value):
        assert not value.__module__.startswith("bridge_cg_plugin")
        assert "bridge_cg_plugin" not in value.__code__.co_filename
    elif inspect.isclass(value):
        assert value.__module__.startswith("megatron.")


@pytest.mark.parametrize("patch", [p for p in PATCHES if p.seam.parameters], ids=lambda p: p.name)
def test_a_target_that_lost_a_parameter_is_left_alone(patch):
    for lost in patch.seam.parameters:
        kept = [p for p in patch.seam.parameters if p != lost]
        drifted = callable_with(patch.seam.kind, [*(["self"] if patch.seam.kind == "class" else []), *kept])
        other, module = fresh(patch), fake_module(patch, drifted)
        other.apply(module)
        assert other.state == "broken"
        assert lost in other.reason and patch.target in other.reason
        assert raw(patch, module) is drifted
        other.revert()
        assert raw(patch, module) is drifted


# Every class has some `__init__`.
@pytest.mark.parametrize("patch", [p for p in PATCHES if not p.target.endswith("__init__")], ids=lambda p: p.name)
@pytest.mark.parametrize("release", ["0.5.1", "0.9.0"])
def test_a_target_that_is_gone_is_broken_where_the_release_had_it(patch, release, monkeypatch):
    monkeypatch.setattr(patches, "bridge_release", lambda: release)
    other, module = fresh(patch), fake_module(patch, ABSENT)
    other.apply(module)
    came_later = (release, patch.seam.since) == ("0.5.1", "0.6.2")
    assert other.state == ("native" if came_later else "broken")
    assert other.reason
    assert raw(patch, module) is ABSENT
    other.revert()
    assert raw(patch, module) is ABSENT


def test_an_inherited_attribute_is_absent_again_after_revert():
    class Base:
        def method(self):
            return "base"

    module = ModuleType("m")
    module.Derived = type("Derived", (Base,), {})
    patch = made_up("Derived.method", lambda old: lambda self: "patched " + old(self))
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
    patch = made_up("Owner.method", lambda old: staticmethod(lambda: old() + 1))
    patch.apply(module)
    assert Owner.method() == 2
    patch.revert()
    assert vars(Owner)["method"] is before


def test_a_maker_that_raises_leaves_upstream_alone():
    module = ModuleType("m")
    module.function = before = lambda: 1
    patch = made_up("function", lambda old: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        patch.apply(module)
    assert module.function is before and patch.state == "off"


def test_the_replacement_of_a_function_keeps_its_signature_and_name(active):
    for patch in PATCHES:
        value = raw(patch, active[patch.module])
        if patch.state == "active" and inspect.isfunction(value):
            original = inspect.unwrap(value)
            signature, before = inspect.signature(value), inspect.signature(original)
            options = graph_fields.EVERY if patch.target.endswith("Provider.__init__") else {}
            kept = [p for name, p in signature.parameters.items() if name in before.parameters or name not in options]
            assert signature.replace(parameters=kept) == before, patch.name
            assert value.__qualname__ == original.__qualname__, patch.name


# Others patch what the plugin patches.

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


def wrap(module):
    """Patch `function` as another plugin does; returns how it undoes that."""
    before = module.function

    def theirs(value=0):
        return ["theirs", *before(value)]

    module.function = functools.wraps(before)(theirs)
    return lambda: setattr(module, "function", before)


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
