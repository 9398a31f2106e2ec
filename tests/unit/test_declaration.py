"""A new option touches two files: its declaration, and the code that uses it."""

import argparse
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from bridge_cg_plugin.options import OptionError, VisionGraphOptions, normalize
from bridge_cg_plugin.options import flags as flags_module
from bridge_cg_plugin.options.declaration import option, whole_number
from bridge_cg_plugin.options.explain import further
from bridge_cg_plugin.options.flags import add_flags, flags_of, given_flags
from bridge_cg_plugin.options.vision import VISION
from bridge_cg_plugin.upstream.hooks.graph_fields import accepting_init, extended_fields

from .test_option_docs import group_table, tuning_table

FIELD = "vision_cuda_graph_echoes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended(VisionGraphOptions):
    echoes: int = option(3, whole_number(1), "how often each image is seen", "More is slower")


EXTENDED = replace(VISION, kind=Extended)


def test_it_is_typed_and_checked():
    assert Extended(**EXTENDED.read({FIELD: "5"})).echoes == 5
    with pytest.raises(OptionError, match=f"{FIELD}=0: it must be a whole number of at least 1"):
        EXTENDED.read({FIELD: 0})


def test_it_has_a_flag(monkeypatch):
    monkeypatch.setattr(flags_module, "FLAGS", flags_of([EXTENDED]))
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert given_flags(parser.parse_args(["--vision-cuda-graph-echoes", "7"])) == {FIELD: "7"}
    assert "how often each image is seen" in parser.format_help()


def test_it_is_a_field_of_providers():
    class Provider:
        def __init__(self, layers=1):
            self.layers = layers

    made = accepting_init(Provider.__init__, EXTENDED.added)
    Provider.__init__ = made
    assert Provider(layers=2).vision_cuda_graph_echoes == 3
    assert Provider(vision_cuda_graph_echoes=9).vision_cuda_graph_echoes == 9
    assert extended_fields({}, EXTENDED.added)[FIELD].default == 3


def test_it_is_in_the_table():
    cells = (f"`{FIELD}`", "a whole number of at least 1", "`3`", "how often each image is seen. More is slower")
    assert f"| {' | '.join(cells)} |" in group_table(EXTENDED).splitlines()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned(VisionGraphOptions):
    echoes: int = option(3, whole_number(1), "how often each image is seen", tuning=True)


TUNED = replace(VISION, kind=Tuned)


def test_a_tuning_value_is_an_entry_of_the_mapping():
    assert Tuned(**TUNED.read({"vision_cuda_graph_tuning": {"echoes": "5"}})).echoes == 5
    assert TUNED.added == VISION.added and FIELD not in TUNED.names
    assert [flag.name for flag in flags_of([TUNED])] == [flag.name for flag in flags_of([VISION])]
    assert "echoes" in flags_of([TUNED])[-1].meaning
    assert "| `echoes` | a whole number of at least 1 | `3` | how often each image is seen |" in tuning_table(TUNED)
    assert further(Tuned(echoes=4), TUNED) == ["vision_cuda_graph_tuning.echoes=4"]


@pytest.mark.parametrize(
    "written",
    [
        "vision_cuda_graph_tuning.kernels=exact vision_cuda_graph_tuning.slots=2",
        "model.vision_cuda_graph_tuning.kernels=exact vision_cuda_graph_tuning=slots=2",
        "model.vision_cuda_graph_tuning={kernels:exact,slots:2}",
        "--vision-cuda-graph-tuning kernels=exact,slots=2",
        "model:\n  vision_cuda_graph_tuning:\n    kernels: exact\n    slots: 2\n",
        {"model": {"vision_cuda_graph_tuning": {"kernels": "exact", "slots": 2}}},
        {"vision_cuda_graph_tuning.kernels": "exact", "model.vision_cuda_graph_tuning.slots": 2},
        SimpleNamespace(vision_cuda_graph_tuning={"kernels": "exact", "slots": 2}),
    ],
    ids=str,
)
def test_spellings_of_tuning_values(written):
    vision = normalize(written)[0].vision
    assert (vision.kernels, vision.slots) == ("exact", 2)


def test_later_tuning_values_win_one_by_one():
    recipe = SimpleNamespace(vision_cuda_graph_tuning={"kernels": "exact", "slots": 2})
    vision = normalize(recipe, "vision_cuda_graph_tuning.slots=4")[0].vision
    assert (vision.kernels, vision.slots) == ("exact", 4)
    assert normalize(recipe, "vision_cuda_graph_tuning=null")[0].vision == VisionGraphOptions()
    assert normalize(recipe, "vision_cuda_graph_tuning.slots=null")[0].vision.kernels == "exact"


@pytest.mark.parametrize(
    "written, says",
    [
        (
            "vision_cuda_graph_tuning.kernls=fast",
            r"kernls': there is no such tuning value. Did you mean vision_cuda_graph_tuning.kernels\?",
        ),
        ("vision_cuda_graph_tuning.zzz=2", "there are slots, max_frames"),
        ("vision_cuda_graph_tuning=fast", "vision_cuda_graph_tuning='fast': it must be name=value,name=value"),
        (
            "vision_cuda_graph_tuning.slots=0",
            "tuning.slots='0': it must be a whole number of at least 1",
        ),
        (
            SimpleNamespace(vision_cuda_graph_tuning={"slts": 2}),
            "vision_cuda_graph_tuning.slts'.*vision_cuda_graph_tuning.slots",
        ),
        (SimpleNamespace(vision_cuda_graph_tuning=3), "vision_cuda_graph_tuning=3"),
        ("vision_cuda_graph_kernels=fast", "there is no such option"),
    ],
    ids=str,
)
def test_refused_tuning_values(written, says):
    with pytest.raises(OptionError, match=says):
        normalize(written)
