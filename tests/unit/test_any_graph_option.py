"""Graph options of any value: typed or refused, the same when normalized again and when read back."""

import json
from types import NoneType, SimpleNamespace, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.options import CudaGraphModule, OptionError, as_fields, normalize
from bridge_cg_plugin.options import graph_options as make
from bridge_cg_plugin.options.graph_options import GROUPS, TE_RNG, field_values
from bridge_cg_plugin.options.language_model import DEPRECATED, MODULE_NAMES

FIELDS = sorted({field for group in GROUPS for field in group.fields.values()})
UPSTREAMS = {*DEPRECATED, TE_RNG, *(one.field for group in GROUPS for one in group.options if one.upstreams)}
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
