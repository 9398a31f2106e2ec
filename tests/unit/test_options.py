import dataclasses
from enum import Enum
from types import NoneType, SimpleNamespace, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.options import (
    OFFLOAD_MODULES,
    PROVIDER_FIELDS,
    OptionError,
    VisionGraphOptions,
    vision_options,
)
from bridge_cg_plugin.options.vision import VISION

_PARSERS = {one.name: one.parse for one in VISION.options}
TUNING = {one.name for one in VISION.tuned}


class Scope(Enum):
    attn = 1
    mlp = 2
    full = 3
    full_iteration = 4


class Implementation(Enum):
    none = 1
    transformer_engine = 2
    local = 3


def read(merge_unit=4, **options):
    fields = {PROVIDER_FIELDS[name]: value for name, value in options.items() if name not in TUNING}
    tuning = {name: value for name, value in options.items() if name in TUNING}
    found = vision_options(SimpleNamespace(**fields, vision_cuda_graph_tuning=tuning), merge_unit)
    assert vision_options({**fields, "vision_cuda_graph_tuning": tuning}, merge_unit) == found
    assert vision_options({PROVIDER_FIELDS[name]: value for name, value in options.items()}, merge_unit) == found
    return found


def enabled(**options):
    return read(impl="transformer_engine", **options)


def test_unset_fields_take_their_default():
    assert read(impl=None, scope=None, buckets=None, slots=None) == VisionGraphOptions()


def test_upstreams_field_names_are_kept():
    assert PROVIDER_FIELDS["impl"] == "vision_cuda_graph_impl"
    assert PROVIDER_FIELDS["scope"] == "vision_cuda_graph_scope"
    assert PROVIDER_FIELDS["max_seq_length"] == "max_vision_cuda_graph_seq_length"


def test_every_option_has_a_field_and_a_parser():
    pinned = {"grows", "streams"}
    names = [f.name for f in dataclasses.fields(VisionGraphOptions) if f.name not in pinned]
    assert sorted(PROVIDER_FIELDS) == sorted(_PARSERS) == sorted(names)
    assert len(set(PROVIDER_FIELDS.values())) == len(names)


# Spellings of each kind of value.
ACCEPTED = [
    ("impl", " Transformer_Engine ", "transformer_engine"),
    ("impl", Implementation.transformer_engine, "transformer_engine"),
    ("impl", "CudaGraphImpl.none", "none"),
    ("scope", ["full"], ()),
    ("scope", "ATTN, mlp", ("attn", "mlp")),
    ("scope", ["mlp", "attn", "mlp"], ("mlp", "attn")),
    ("scope", [Scope.attn, "CudaGraphScope.mlp"], ("attn", "mlp")),
    ("max_seq_length", "4096", 4096),
    ("buckets", " auto ", "auto"),
    ("buckets", ["64", 128], (64, 128)),
    ("buckets", "[64, 128]", (64, 128)),
    ("slots", "auto", "auto"),
    ("slots", "3", 3),
    ("buckets_max_gb", "2.5", 2.5),
    ("exact_below", 0, 0),
    ("kernels", "fast", "fast"),
    ("offload", "all", OFFLOAD_MODULES),
    ("offload", "none", ()),
    ("recompute", "[gelu, layernorm]", ("gelu", "layernorm")),
    ("strict", "1", True),
]


@pytest.mark.parametrize("option, value, expected", ACCEPTED)
def test_accepted_spellings(option, value, expected):
    found = getattr(read(**{option: value}), option)
    assert found == expected
    assert type(found) is type(expected)


REFUSED = [
    ("impl", "local"),
    ("impl", True),
    ("scope", ["attn", "router"]),
    ("scope", Scope.full_iteration),
    ("max_seq_length", 0),
    ("max_seq_length", True),
    ("max_seq_length", 66),
    ("max_seq_length", 64.5),
    ("buckets", "[]"),
    ("buckets", 64),
    ("buckets", [64, 64]),
    ("buckets", [64, 66]),
    ("buckets", [0, 64]),
    ("buckets", [64, None]),
    ("buckets", "automatic"),
    ("slots", -1),
    ("slots", numpy.array([2, 4])),
    ("buckets_max_gb", 0),
    ("buckets_max_gb", float("nan")),
    ("buckets_max_gb", "much"),
    ("kernels", 3),
    ("offload", "all,mlp"),
    ("recompute", True),
    ("strict", "maybe"),
]


@pytest.mark.parametrize("option, value", REFUSED)
def test_refused_values_name_their_field(option, value):
    given_options = {"impl": "transformer_engine", option: value}
    with pytest.raises(OptionError) as caught:
        read(**given_options)
    assert caught.value.field == PROVIDER_FIELDS[option]
    assert f"{PROVIDER_FIELDS[option]}=" in str(caught.value) and "it must be" in str(caught.value)


def test_a_bucket_above_the_largest_length():
    with pytest.raises(OptionError, match="at most max_vision_cuda_graph_seq_length=128") as caught:
        enabled(buckets=[64, 256], max_seq_length=128)
    assert caught.value.field == "vision_cuda_graph_buckets"
    assert enabled(buckets=[64, 128], max_seq_length=128).buckets == (64, 128)


def test_capacities_follow_the_merge_unit():
    assert read(9, impl="transformer_engine", buckets=[9, 18]).buckets == (9, 18)
    with pytest.raises(OptionError, match="a multiple of 9"):
        read(9, impl="transformer_engine", buckets=[64])


def kinds_of(hint):
    """Yield the classes of the values that an annotation allows, besides None."""
    if get_origin(hint) in (Union, UnionType):
        for each in get_args(hint):
            yield from kinds_of(each)
    elif get_origin(hint) is Literal:
        yield from map(type, get_args(hint))
    elif hint is not NoneType:
        yield get_origin(hint) or hint


KINDS = {name: tuple(kinds_of(hint)) for name, hint in get_type_hints(VisionGraphOptions).items()}


@given(
    st.sampled_from(sorted(_PARSERS)), st.one_of(st.text(max_size=12), st.text("0123456789,[]. -eaunitof", max_size=12))
)
def test_any_string_gives_a_typed_value_or_an_option_error(option, text):
    parse, field = _PARSERS[option], PROVIDER_FIELDS[option]
    try:
        value = parse(field, text)
    except OptionError as error:
        assert error.field == field
        return
    assert parse(field, value) == value
    assert isinstance(value, KINDS[option])


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.lists(st.integers(-2, 300), max_size=4),
)


@given(st.dictionaries(st.sampled_from(sorted(PROVIDER_FIELDS)), values))
def test_reading_what_was_read_changes_nothing(given_options):
    try:
        found = read(**given_options)
    except OptionError:
        return
    again = read(**{name: getattr(found, name) for name in PROVIDER_FIELDS})
    assert again == found
