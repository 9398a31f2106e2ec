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
    RECOMPUTE,
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


def test_nothing_set_gives_the_defaults():
    assert vision_options({}) == vision_options(object()) == VisionGraphOptions()
    assert not VisionGraphOptions().enabled


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


ACCEPTED = [
    ("impl", "transformer_engine", "transformer_engine"),
    ("impl", " Transformer_Engine ", "transformer_engine"),
    ("impl", Implementation.transformer_engine, "transformer_engine"),
    ("impl", "CudaGraphImpl.none", "none"),
    ("impl", "none", "none"),
    ("scope", [], ()),
    ("scope", "", ()),
    ("scope", "full", ()),
    ("scope", ["full"], ()),
    ("scope", "attn", ("attn",)),
    ("scope", "ATTN", ("attn",)),
    ("scope", "attn,mlp", ("attn", "mlp")),
    ("scope", "attn, mlp", ("attn", "mlp")),
    ("scope", ["mlp", "attn", "mlp"], ("mlp", "attn")),
    ("scope", ("mlp",), ("mlp",)),
    ("scope", Scope.attn, ("attn",)),
    ("scope", [Scope.attn, "mlp"], ("attn", "mlp")),
    ("scope", Scope.full, ()),
    ("scope", "CudaGraphScope.mlp", ("mlp",)),
    ("max_seq_length", 4096, 4096),
    ("max_seq_length", "4096", 4096),
    ("buckets", "auto", "auto"),
    ("buckets", " auto ", "auto"),
    ("buckets", [64, 128], (64, 128)),
    ("buckets", (64,), (64,)),
    ("buckets", ["64", 128], (64, 128)),
    ("buckets", "64,128", (64, 128)),
    ("buckets", "[64, 128]", (64, 128)),
    ("slots", "auto", "auto"),
    ("slots", 3, 3),
    ("slots", "3", 3),
    ("max_frames", "auto", "auto"),
    ("max_frames", 8, 8),
    ("buckets_max_gb", 2, 2.0),
    ("buckets_max_gb", "2.5", 2.5),
    ("exact_below", 0, 0),
    ("kernels", "fast", "fast"),
    ("kernels", "auto", "auto"),
    ("attention", "auto", "auto"),
    ("attention", "cudnn", "cudnn"),
    ("offload", "all", OFFLOAD_MODULES),
    ("offload", "none", ()),
    ("offload", [], ()),
    ("offload", "attention, mlp", ("attention", "mlp")),
    ("offload", ["MLP"], ("mlp",)),
    ("recompute", "[gelu, layernorm]", ("gelu", "layernorm")),
    ("recompute", "all", RECOMPUTE),
    ("offload_above_gb", "6.5", 6.5),
    ("strict", True, True),
    ("strict", "1", True),
    ("check_interval", 0, 0),
    ("check_interval", "100", 100),
]


@pytest.mark.parametrize("option, value, expected", ACCEPTED)
def test_accepted_spellings(option, value, expected):
    found = getattr(read(**{option: value}), option)
    assert found == expected
    assert type(found) is type(expected)


REFUSED = [
    ("impl", "local"),
    ("impl", Implementation.local),
    ("impl", ""),
    ("impl", True),
    ("scope", "moe"),
    ("scope", ["attn", "router"]),
    ("scope", Scope.full_iteration),
    ("scope", 3),
    ("max_seq_length", 0),
    ("max_seq_length", -4),
    ("max_seq_length", True),
    ("max_seq_length", 3),
    ("max_seq_length", 66),
    ("max_seq_length", 64.5),
    ("max_seq_length", "large"),
    ("buckets", []),
    ("buckets", ""),
    ("buckets", "[]"),
    ("buckets", 64),
    ("buckets", [128, 64]),
    ("buckets", [64, 64]),
    ("buckets", [64, 66]),
    ("buckets", [2, 64]),
    ("buckets", [0, 64]),
    ("buckets", [-64, 64]),
    ("buckets", ["small"]),
    ("buckets", [64, None]),
    ("buckets", [True]),
    ("buckets", [64.5]),
    ("buckets", "automatic"),
    ("slots", 0),
    ("slots", -1),
    ("slots", True),
    ("slots", "many"),
    ("slots", 1.5),
    ("slots", numpy.array([2, 4])),
    ("max_frames", 0),
    ("max_frames", False),
    ("buckets_max_gb", 0),
    ("buckets_max_gb", -1),
    ("buckets_max_gb", True),
    ("buckets_max_gb", float("nan")),
    ("buckets_max_gb", float("inf")),
    ("buckets_max_gb", "much"),
    ("exact_below", -1),
    ("exact_below", True),
    ("kernels", "fastest"),
    ("kernels", 3),
    ("attention", "sdpa"),
    ("offload", "everything"),
    ("offload", ["attention", "fc1"]),
    ("offload", "all,mlp"),
    ("recompute", ["attention"]),
    ("recompute", True),
    ("offload_above_gb", 0),
    ("offload_above_gb", "little"),
    ("strict", "maybe"),
    ("strict", []),
    ("check_interval", -1),
    ("check_interval", True),
]


@pytest.mark.parametrize("option, value", REFUSED)
def test_refused_values_name_their_field(option, value):
    given_options = {"impl": "transformer_engine", option: value}
    with pytest.raises(OptionError) as caught:
        read(**given_options)
    assert caught.value.field == PROVIDER_FIELDS[option]
    assert PROVIDER_FIELDS[option] in str(caught.value)
    assert "it must be" in str(caught.value)


def test_a_bucket_above_the_largest_length():
    with pytest.raises(OptionError, match="at most max_vision_cuda_graph_seq_length=128") as caught:
        enabled(buckets=[64, 256], max_seq_length=128)
    assert caught.value.field == "vision_cuda_graph_buckets"
    assert enabled(buckets=[64, 128], max_seq_length=128).buckets == (64, 128)


@pytest.mark.parametrize("given", [{"offload": ["mlp"]}, {"recompute": "all"}, {"offload_above_gb": 4}])
def test_what_moves_activations(given):
    assert enabled(**given).moves_activations


def test_without_a_word_activations_stay():
    assert not enabled().moves_activations
    assert not enabled(offload="none", recompute=[]).moves_activations


def test_capacities_follow_the_merge_unit():
    assert read(9, impl="transformer_engine", buckets=[9, 18]).buckets == (9, 18)
    with pytest.raises(OptionError, match="a multiple of 9"):
        read(9, impl="transformer_engine", buckets=[64])


def test_capacities_are_not_checked_while_graphs_are_off():
    assert read(buckets=[66]).buckets == (66,)


@pytest.mark.parametrize("option, value", [("buckets", "128,64"), ("scope", "attn,router"), ("slots", "many")])
def test_a_refusal_shows_the_value_as_it_was_given(option, value):
    with pytest.raises(OptionError) as caught:
        enabled(**{option: value})
    assert f"{PROVIDER_FIELDS[option]}={value!r}" in str(caught.value)


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
