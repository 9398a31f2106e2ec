"""A new option touches two files: its declaration, and the code that uses it."""

import argparse
from dataclasses import dataclass, replace

import pytest

from bridge_cg_plugin.options import OptionError, VisionGraphOptions
from bridge_cg_plugin.options import flags as flags_module
from bridge_cg_plugin.options.declaration import Group, option
from bridge_cg_plugin.options.explain import further, group_table
from bridge_cg_plugin.options.flags import FLAGS, add_flags, flags_of, given_flags
from bridge_cg_plugin.options.groups import GROUPS
from bridge_cg_plugin.options.releases import RELEASES, fields_since
from bridge_cg_plugin.options.values import whole_number
from bridge_cg_plugin.options.vision import VISION
from bridge_cg_plugin.upstream.hooks.provider_fields import accepting_init, extended_fields

FIELD = "vision_cuda_graph_echoes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended(VisionGraphOptions):
    echoes: int = option(3, whole_number(1), "N", "how often each image is seen", "More is slower")


EXTENDED = replace(VISION, kind=Extended)


def test_it_is_typed_and_checked():
    assert Extended(**EXTENDED.read({FIELD: "5"})).echoes == 5
    with pytest.raises(OptionError, match=f"{FIELD}=0: allowed is a whole number of at least 1"):
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
    row = (
        f"| `{FIELD}` | a whole number of at least 1 | `3` | how often each image is seen. More is slower | `echoes` |"
    )
    assert row in group_table(EXTENDED).splitlines()


def test_explain_says_it():
    assert further(Extended(echoes=4), EXTENDED) == [f"{FIELD}=4"]


def test_a_field_of_upstreams_belongs_to_the_releases_that_have_it():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Upstreams:
        late: int = option(0, whole_number(0), "N", "of a late release", since="0.6")

    group = Group(name="theirs", kind=Upstreams)
    assert group.added == {} and group.names == ("late",)
    assert [release.fields for release in RELEASES] == [fields_since(name) for name in ("0.6", "0.5", "0.4")]
    assert fields_since("0.4") < fields_since("0.5") < fields_since("0.6")


def test_every_group_is_among_the_flags():
    assert flags_of(GROUPS) == FLAGS
