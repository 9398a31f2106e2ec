"""Graph options of any value: typed or refused, the same when normalized again and when read back."""

import json
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.options import (
    CudaGraphModule,
    GraphOptions,
    InferenceCudaGraphScope,
    OptionError,
    as_fields,
    normalize,
)
from bridge_cg_plugin.options import graph_options as make
from bridge_cg_plugin.options.graph_options import RELEASES, field_values
from bridge_cg_plugin.options.language_model import INFERENCE_SCOPES
from bridge_cg_plugin.options.sources import FIELDS

from .option_values import modules, texts, values


def typed(found):
    assert type(found) is GraphOptions
    lm_options = found.language_model
    assert type(lm_options.impl) is str and lm_options.impl in INFERENCE_SCOPES
    assert type(lm_options.modules) is tuple and all(type(m) is CudaGraphModule for m in lm_options.modules)
    assert type(lm_options.inference_scope) is InferenceCudaGraphScope
    assert type(found.packed.max_packed_seqs) in (int, type(None))


@given(st.one_of(texts, st.lists(texts, max_size=3)))
def test_no_words_lead_to_an_untyped_value_or_another_exception(words):
    try:
        typed(make(words))
    except OptionError:
        return


@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=4))
def test_no_value_leads_to_an_untyped_value_or_another_exception(fields):
    try:
        typed(make(fields))
    except OptionError:
        return


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


@given(likely, st.sampled_from(RELEASES))
def test_what_a_release_is_told_reads_back_the_same(fields, release):
    try:
        wanted = make({**fields, "vision_cuda_graph_impl": None, "vision_cuda_graph_scope": None})
        told = field_values(wanted, release)
    except OptionError:
        return
    assert normalize(SimpleNamespace(**told))[0] == wanted
