"""Every spelling of graph options, against what each release can be told."""

import enum
import json
import re
from types import NoneType, SimpleNamespace, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bridge_cg_plugin.options as options_package
from bridge_cg_plugin.options import (
    CudaGraphModule,
    GraphOptions,
    GraphOptionWarning,
    InferenceCudaGraphScope,
    LanguageModelGraphOptions,
    OptionError,
    PackedOptions,
    VisionGraphOptions,
    as_fields,
    normalize,
)
from bridge_cg_plugin.options import graph_options as make
from bridge_cg_plugin.options.graph_options import GROUPS, LAST_WITH_LOCAL, TE_RNG, field_values
from bridge_cg_plugin.options.language_model import DEPRECATED, MODULE_NAMES

NEW, OLD = "megatron-bridge 0.6.2", ""
# The fields about graphs that upstream's configurations have.
UPSTREAMS = {*DEPRECATED, TE_RNG, *(one.field for group in GROUPS for one in group.options if one.upstreams)}
M, S = CudaGraphModule, InferenceCudaGraphScope


class CudaGraphScope(enum.Enum):
    """Upstream's old enum, with its own numbers."""

    full_iteration = 1
    attn = 2
    mlp = 3
    full_iteration_inference = 8


def lm(impl="none", modules=(), scope=S.none):
    return LanguageModelGraphOptions(impl=impl, modules=modules, inference_scope=scope)


# What a user writes and what it means.
SPELLINGS = [
    ({}, lm()),
    ({"enable_cuda_graph": True}, lm("local", (), S.layer)),
    ({"external_cuda_graph": True}, lm("transformer_engine")),
    ({"enable_cuda_graph": False, "external_cuda_graph": 0}, lm()),
    ({"cuda_graph_scope": "full_iteration"}, lm("full_iteration")),
    ({"cuda_graph_modules": "full_iteration"}, lm("full_iteration")),
    ({"cuda_graph_scope": [CudaGraphScope.full_iteration]}, lm("full_iteration")),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, lm("full_iteration")),
    ({"cuda_graph_impl": "none", "cuda_graph_scope": "full_iteration"}, lm()),
    ({"cuda_graph_scope": "full_iteration_inference"}, lm("local", (), S.block)),
    ({"cuda_graph_impl": "local", "inference_cuda_graph_scope": "block"}, lm("local", (), S.block)),
    (
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,mlp"},
        lm("transformer_engine", (M.attn, M.mlp)),
    ),
    (
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", M.attn, "CudaGraphModule.mlp"]},
        lm("transformer_engine", (M.attn, M.mlp)),
    ),
    ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "full"}, lm("transformer_engine")),
    ({"cuda_graph_impl": " Transformer_Engine "}, lm("transformer_engine")),
    (
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [{"_target_": "x", "_name_": "attn"}]},
        lm("transformer_engine", (M.attn,)),
    ),
    (
        {
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_scope": "attn,mlp",
            "cuda_graph_modules": ["mlp", "attn"],
        },
        lm("transformer_engine", (M.mlp, M.attn)),
    ),
]


def as_words(fields):
    return [f"model.{name}={','.join(map(str, v)) if isinstance(v, list) else v}" for name, v in fields.items()]


@pytest.mark.parametrize("release", [NEW, OLD])
@pytest.mark.parametrize("fields, expected", SPELLINGS, ids=str)
def test_spellings(fields, expected, release):
    found = make(fields)
    assert found.language_model == expected
    assert make(SimpleNamespace(**fields)).language_model == expected
    values = field_values(found, UPSTREAMS, release)
    assert values["cuda_graph_impl"] == expected.impl
    assert values["cuda_graph_modules"] == [m.name for m in expected.modules]
    assert values["inference_cuda_graph_scope"] == expected.inference_scope.name
    assert values["cuda_graph_scope"] is None
    assert values["enable_cuda_graph"] is False and values["external_cuda_graph"] is False
    assert normalize(SimpleNamespace(**values))[0].language_model == expected


@pytest.mark.parametrize(
    "fields, expected",
    [
        (f, e)
        for f, e, *_ in SPELLINGS
        if all(isinstance(v, str | list | bool) for v in f.values()) and "_name_" not in str(f)
    ],
    ids=str,
)
def test_words_flags_and_yaml_mean_the_same(fields, expected):
    plain = {name: [str(getattr(x, "name", x)) for x in v] if isinstance(v, list) else v for name, v in fields.items()}
    assert make(as_words(plain)).language_model == expected
    assert make(" ".join(as_words(plain)).replace("= ", "=")).language_model == expected
    flags = [
        part
        for name, v in plain.items()
        for part in (f"--{name.replace('_', '-')}", *(v if isinstance(v, list) else [str(v)]))
    ]
    assert make(flags).language_model == expected
    assert make(json.dumps({"model": plain}) + "\n").language_model == expected


DISAGREE = [
    ({"enable_cuda_graph": True, "cuda_graph_impl": "none"}, "enable_cuda_graph", "cuda_graph_impl"),
    ({"external_cuda_graph": True, "cuda_graph_impl": "local"}, "external_cuda_graph", "cuda_graph_impl"),
    ({"external_cuda_graph": True, "enable_cuda_graph": True}, "enable_cuda_graph", "external_cuda_graph"),
    ({"cuda_graph_scope": "attn", "cuda_graph_modules": []}, "cuda_graph_scope", "cuda_graph_modules"),
    (
        {"cuda_graph_scope": "full_iteration", "cuda_graph_impl": "transformer_engine"},
        "cuda_graph_scope",
        "cuda_graph_impl",
    ),
    (
        {"cuda_graph_scope": "full_iteration_inference", "inference_cuda_graph_scope": "layer"},
        "cuda_graph_scope",
        "inference_cuda_graph_scope",
    ),
    ({"cuda_graph_scope": "full_iteration,full_iteration_inference"}, "cuda_graph_scope", "full_iteration_inference"),
]


@pytest.mark.parametrize("fields, deprecated, new", DISAGREE, ids=str)
def test_a_deprecated_and_a_new_value_that_disagree(fields, deprecated, new):
    for source in (fields, as_words({k: getattr(v, "name", v) for k, v in fields.items()})):
        with pytest.raises(OptionError) as caught:
            make(source)
        assert deprecated in str(caught.value) and new in str(caught.value)


REFUSED = [
    ("cuda_graph_impl", "cuda"),
    ("cuda_graph_impl", True),
    ("cuda_graph_modules", "none"),
    ("cuda_graph_modules", "full,attn"),
    ("cuda_graph_modules", ["attn", None]),
    ("inference_cuda_graph_scope", "model"),
    ("enable_cuda_graph", "perhaps"),
    ("cuda_graph_max_packed_seqs", "many"),
    ("cuda_graph_packed_buckets", [0, 64]),
    ("cuda_graph_packed_slots", -1),
]


@pytest.mark.parametrize("field, value", REFUSED)
def test_refused_values_name_their_field(field, value):
    with pytest.raises(OptionError) as caught:
        make({field: value})
    assert caught.value.field == field and "it must be" in str(caught.value)


@pytest.mark.parametrize(
    "fields, line",
    [
        ({"enable_cuda_graph": True}, "cuda_graph_impl=local"),
        ({"external_cuda_graph": True}, "cuda_graph_impl=transformer_engine"),
        ({"cuda_graph_scope": "full_iteration"}, "cuda_graph_impl=full_iteration"),
        ({"cuda_graph_scope": "full_iteration_inference"}, "cuda_graph_impl=local inference_cuda_graph_scope=block"),
        ({"cuda_graph_scope": "attn,mlp", "cuda_graph_impl": "transformer_engine"}, "cuda_graph_modules=attn,mlp"),
        ({"cuda_graph_modules": "full"}, "cuda_graph_modules=[]"),
    ],
)
def test_the_line_to_write_instead_means_the_same_without_a_warning(fields, line):
    old = make(fields)
    assert any(f"write {line} instead" in text for text in old.warnings)
    rest = [f"{name}={value}" for name, value in fields.items() if name.endswith("graph_impl")]
    new = make([*line.split(), *rest])
    assert new == old and new.warnings == ()


def test_parts_of_vision_layers_mean_the_whole_encoder_which_is_said():
    on = {"vision_cuda_graph_impl": "transformer_engine"}
    said = "vision_cuda_graph_scope=attn: one graph holds the whole encoder, attention and MLPs"
    assert said in make({**on, "vision_cuda_graph_scope": ["attn"]}).warnings
    assert not any("whole encoder" in text for text in make({**on, "vision_cuda_graph_scope": "attn,mlp"}).warnings)


def test_the_old_enum_is_the_new_one_and_says_so():
    with pytest.warns(GraphOptionWarning, match="CudaGraphModule"):
        assert options_package.CudaGraphScope is CudaGraphModule


def test_an_inference_scope_that_was_derived_goes_with_its_implementation():
    finalized = SimpleNamespace(cuda_graph_impl="local", inference_cuda_graph_scope="layer")
    assert make(finalized, "cuda_graph_impl=transformer_engine").language_model == lm("transformer_engine")
    with pytest.raises(OptionError, match="inference_cuda_graph_scope"):
        make({"inference_cuda_graph_scope": "layer"}, "cuda_graph_impl=transformer_engine")


LOOKALIKES = [
    ("cuda_graph_iml", "cuda_graph_impl"),
    ("vision_cuda_grph_impl", "vision_cuda_graph_impl"),
    ("cuda_graphs_modules", "cuda_graph_modules"),
    ("cudagraph_scope", "cuda_graph_scope"),
]


@pytest.mark.parametrize("wrong, nearest", LOOKALIKES)
def test_unknown_graph_options_name_the_nearest(wrong, nearest):
    for source in ({wrong: "attn"}, f"model.{wrong}=attn", ["--" + wrong.replace("_", "-"), "attn"]):
        with pytest.raises(OptionError, match=rf"{wrong}.*Did you mean {nearest}\?"):
            make(source)


def test_values_that_a_release_cannot_do_name_the_release_that_can():
    local = make("cuda_graph_impl=local cuda_graph_modules=attn")
    with pytest.raises(OptionError, match=re.escape(f"on {NEW}. Use it, or {LAST_WITH_LOCAL}")):
        field_values(local, UPSTREAMS, NEW)
    assert field_values(local, UPSTREAMS)["cuda_graph_modules"] == ["attn"]
    with pytest.raises(OptionError, match="no such field"):
        field_values(GraphOptions(vision=VisionGraphOptions(impl="transformer_engine")), UPSTREAMS)
    with pytest.raises(OptionError, match="no such field"):
        field_values(GraphOptions(packed=PackedOptions(max_packed_seqs=64)), UPSTREAMS)


FIELDS = sorted({field for group in GROUPS for field in group.fields.values()})
texts = st.one_of(
    st.text(max_size=20),
    st.text("attnmlpoefu_i,[] =.:-{}\n\"'<>0123456789", max_size=30),
    st.lists(st.sampled_from([*MODULE_NAMES, "full", "full_iteration", "none", "local", ""]), max_size=3).map(",".join),
)
numbers = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.lists(st.integers(-2, 300), max_size=4))
values = st.one_of(numbers, texts, st.lists(texts, max_size=3))
modules = st.lists(st.sampled_from([*MODULE_NAMES, "full_iteration", "full_iteration_inference"]), max_size=3)


def kinds_of(hint):
    """Yield the classes of the values that an annotation allows."""
    if get_origin(hint) in (Union, UnionType):
        for each in get_args(hint):
            yield from kinds_of(each)
    elif get_origin(hint) is Literal:
        yield from map(type, get_args(hint))
    else:
        yield get_origin(hint) or hint


def assert_typed(found):
    for part in (found.language_model, found.vision, found.packed):
        for name, hint in get_type_hints(type(part)).items():
            assert type(getattr(part, name)) in {*kinds_of(hint), NoneType}, name
    assert all(type(m) is CudaGraphModule for m in found.language_model.modules)


@given(st.one_of(texts, st.lists(texts, max_size=3), st.dictionaries(st.sampled_from(FIELDS), values, max_size=4)))
def test_whatever_is_written_is_typed_and_reads_back_the_same_or_is_refused(source):
    try:
        found = make(source)
    except OptionError:
        return
    assert_typed(found)
    assert normalize(as_fields(found))[0] == normalize(source)[0]


impls = st.sampled_from([None, "none", "local", "transformer_engine", "full_iteration"])
likely = st.fixed_dictionaries(
    {},
    optional={
        "cuda_graph_impl": impls,
        "cuda_graph_modules": modules.map(",".join),
        "cuda_graph_scope": modules,
        "inference_cuda_graph_scope": st.sampled_from([None, "none", "layer", "block"]),
        "enable_cuda_graph": st.booleans(),
        "external_cuda_graph": st.booleans(),
        "vision_cuda_graph_impl": st.sampled_from(["none", "transformer_engine"]),
        "vision_cuda_graph_scope": st.lists(st.sampled_from(["attn", "mlp"])),
        "offload_modules": st.lists(st.sampled_from(["qkv_linear", "moe_act"])),
        "fine_grained_activation_offloading": st.booleans(),
    },
)


@given(likely)
def test_normalizing_twice_is_normalizing_once(fields):
    try:
        once = normalize(fields)[0]
    except OptionError:
        return
    assert normalize(once)[0] is once
    again, _ = normalize(as_fields(once))
    assert again == once
    assert normalize(json.dumps(as_fields(once)) + "\n")[0] == once


@given(likely)
def test_what_a_release_is_told_reads_back_the_same(fields):
    try:
        wanted = make({**fields, "vision_cuda_graph_impl": None, "vision_cuda_graph_scope": None})
        told = field_values(wanted, UPSTREAMS)
    except OptionError:
        return
    assert normalize(SimpleNamespace(**told))[0] == wanted
