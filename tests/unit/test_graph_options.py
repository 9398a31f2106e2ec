"""Every spelling of graph options, against what each release can be told."""

import enum
import json
from types import NoneType, SimpleNamespace, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bridge_cg_plugin.options as options_package
from bridge_cg_plugin.options import (
    CudaGraphModule,
    GraphOptionWarning,
    InferenceCudaGraphScope,
    LanguageModelGraphOptions,
    OptionError,
    as_fields,
    normalize,
)
from bridge_cg_plugin.options import graph_options as make
from bridge_cg_plugin.options.graph_options import GROUPS, TE_RNG, field_values
from bridge_cg_plugin.options.language_model import DEPRECATED, MODULE_NAMES

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


# What a user writes and what it means, beyond what megatron-core reads as well (`tests/seams/test_graph_fields.py`).
SPELLINGS = [
    ({"cuda_graph_scope": "full_iteration"}, lm("full_iteration")),
    ({"cuda_graph_scope": [CudaGraphScope.full_iteration]}, lm("full_iteration")),
    ({"cuda_graph_impl": "none", "cuda_graph_scope": "full_iteration"}, lm()),
    ({"cuda_graph_scope": "full_iteration_inference"}, lm("local", (), S.block)),
    ({"enable_cuda_graph": True}, lm("local", (), S.layer)),
    ({"cuda_graph_impl": " Transformer_Engine ", "cuda_graph_modules": "full"}, lm("transformer_engine")),
    (
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", M.attn, "CudaGraphModule.mlp"]},
        lm("transformer_engine", (M.attn, M.mlp)),
    ),
    (
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": [{"_target_": "x", "_name_": "attn"}]},
        lm("transformer_engine", (M.attn,)),
    ),
    (
        {"external_cuda_graph": True, "cuda_graph_scope": "attn,mlp", "cuda_graph_modules": ["mlp", "attn"]},
        lm("transformer_engine", (M.mlp, M.attn)),
    ),
]


def as_words(fields):
    return [f"model.{name}={','.join(map(str, v)) if isinstance(v, list) else v}" for name, v in fields.items()]


@pytest.mark.parametrize("fields, expected", SPELLINGS, ids=str)
def test_spellings(fields, expected):
    """As a mapping, on a provider, as words, flags and YAML, and as a release is told."""
    found = make(fields)
    assert found.language_model == make(SimpleNamespace(**fields)).language_model == expected
    for release in ("megatron-bridge 0.6.2", ""):
        values = field_values(found, UPSTREAMS, release)
        assert values["cuda_graph_impl"] == expected.impl
        assert values["cuda_graph_modules"] == [m.name for m in expected.modules]
        assert values["inference_cuda_graph_scope"] == expected.inference_scope.name
        assert values["cuda_graph_scope"] is None
        assert values["enable_cuda_graph"] is False and values["external_cuda_graph"] is False
        assert normalize(SimpleNamespace(**values))[0].language_model == expected
    if "_name_" in str(fields):
        return  # what Bridge saved
    plain = {name: [str(getattr(x, "name", x)) for x in v] if isinstance(v, list) else v for name, v in fields.items()}
    words, lists = as_words(plain), {name: v if isinstance(v, list) else [str(v)] for name, v in plain.items()}
    flags = [part for name, v in lists.items() for part in (f"--{name.replace('_', '-')}", *v)]
    for written in (words, " ".join(words).replace("= ", "="), flags, json.dumps({"model": plain}) + "\n"):
        assert make(written).language_model == expected


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


anything = st.one_of(texts, st.lists(texts, max_size=3), st.dictionaries(st.sampled_from(FIELDS), values, max_size=4))


@settings(max_examples=100)
@given(st.booleans().flatmap(lambda known: likely if known else anything))
def test_whatever_is_written_is_typed_and_reads_back_the_same_or_is_refused(source):
    try:
        found = make(source)
    except OptionError:
        return
    assert_typed(found)
    once = normalize(source)[0]
    assert normalize(once)[0] is once
    assert normalize(as_fields(found))[0] == normalize(as_fields(once))[0] == once
    assert normalize(json.dumps(as_fields(once)) + "\n")[0] == once


@given(likely)
def test_what_a_release_is_told_reads_back_the_same(fields):
    try:
        wanted = make({**fields, "vision_cuda_graph_impl": None, "vision_cuda_graph_scope": None})
        told = field_values(wanted, UPSTREAMS)
    except OptionError:
        return
    assert normalize(SimpleNamespace(**told))[0] == wanted
