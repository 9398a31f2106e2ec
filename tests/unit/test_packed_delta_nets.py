"""Gated delta nets on graphs of packed documents and padded rows, against eager, through executors without a GPU.

Upstream loses documents behind one of no tokens: such packs are compared with eager without it.
"""

from functools import partial

import pytest
import torch
from fla.ops.utils import index
from hypothesis import example, given, settings
from hypothesis import strategies as st
from megatron.core.ssm import gated_delta_net

from bridge_cg_plugin.language.packed.batch import chunk_indices, chunk_offsets, with_padding
from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.decoder.block import TransformerBlockFamily
from bridge_cg_plugin.upstream.kernels import recompute

from .delta_nets import new_delta_nets, stand_ins
from .packs import (
    EXPERTS,
    WARMUP,
    assert_adds_to_main_grads,
    assert_same,
    eager,
    ends,
    graphs_on,
    losses_and_gradients,
    pack,
    replayed,
    replaying,
    unpacked,
    with_images,
)
from .test_recompute import FULL, let_whole_layers_be_recomputed
from .towers import poison

LEAST_BYTES = 1


@pytest.fixture(scope="module", autouse=True)
def kernels():
    with stand_ins():
        yield


@pytest.fixture(scope="module")
def model():
    return new_delta_nets()


@pytest.fixture(scope="module")
def graphs(model, executor_kind):
    with graphs_on(model, pack(WARMUP)) as made:
        yield made


@pytest.fixture(scope="module")
def bare():
    """A model that tests put graphs of their own on."""
    return new_delta_nets()


sizes_of_chunks = st.sampled_from((1, 4, 16, 64))
any_lengths = st.lists(st.integers(0, 200), min_size=1, max_size=9).filter(any)


@settings(max_examples=200)
@given(any_lengths, st.integers(0, 200), sizes_of_chunks)
def test_chunks_are_those_of_flash_linear_attention_without_empty_documents(lengths, padding, size):
    tokens = sum(lengths) + padding
    documents = with_padding(ends(lengths), tokens)
    offsets, found = chunk_offsets(documents, size, tokens), chunk_indices(documents, size, tokens)
    assert torch.equal(offsets, index.prepare_chunk_offsets.__wrapped__(documents, size))
    counts = documents.diff()
    kept = counts.nonzero()[:, 0]
    expected = index.prepare_chunk_indices.__wrapped__(ends(counts[kept].tolist()), size)
    there = int(offsets[-1])
    assert found.dtype == expected.dtype == documents.dtype and len(expected) == there <= len(found)
    assert torch.equal(found[:there, 0], kept[expected[:, 0].long()].int())
    assert torch.equal(found[:there, 1], expected[:, 1])
    document, place = found[there:].long().unbind(1)
    assert (counts[document] > 0).all() and (place * size >= counts[document]).all()


@settings(max_examples=50)
@given(st.integers(1, 300), st.integers(1, 20), sizes_of_chunks)
def test_there_is_room_for_the_chunks_of_any_documents(tokens, documents, size):
    """One token in each document but one makes most chunks."""
    lengths = [1] * min(documents - 1, tokens - 1)
    lengths.append(tokens - len(lengths))
    lengths += [0] * (documents - len(lengths))
    assert len(chunk_indices(ends(lengths), size, tokens)) >= sum(-(-length // size) for length in lengths)


lengths_of_packs = st.lists(st.integers(0, 300), min_size=1, max_size=6).filter(lambda n: 257 <= sum(n) <= 512)


@pytest.mark.both_executors
@settings(max_examples=15)
@given(lengths_of_packs, st.integers(0, 3))
@example([1, 1, 300, 1, 1], 0)
def test_any_pack_from_one_capture(model, graphs, lengths, repeats):
    expected = eager(model, graphs, pack([length for length in lengths if length]))
    before = replayed(graphs)
    poison(graphs, float("nan"))
    assert_same(losses_and_gradients(model, pack(lengths, repeats=repeats)), expected)
    assert replayed(graphs) == before + 1


ANY = [pack(lengths) for lengths in (WARMUP, (30, 180, 77))]
CASES = {
    "padding between documents": ({}, [pack((90, 191), room=(96, 194)), pack((290,), room=(300,))], {}, 1),
    "a padded row": ({}, [unpacked(96)], {"cuda_graph_max_packed_seqs": None}, 1),
    "Qwen3.5-VL's with images": ({"qwen": True, "layers": 6}, list(map(with_images, ANY)), {}, 1),
    "experts": (EXPERTS, ANY, {"cuda_graph_modules": []}, 1),
    "attention and routers": (EXPERTS, ANY, {"cuda_graph_modules": ["attn", "moe_router"]}, 3),
    "attention": ({}, ANY, {"cuda_graph_modules": ["attn"]}, 3),
    # Autograd keeps offsets through hooks, which may give others of the same content back.
    "activations leave": ({}, ANY, {"cuda_graph_packed_offload": "all"}, 1),
}


@pytest.mark.parametrize("fields, batches, options, regions", CASES.values(), ids=CASES)
def test_batches_parts_and_experts(fields, batches, options, regions):
    with replaying(new_delta_nets(**fields), batches, **options) as graphs:
        assert len(graphs._regions) == regions
        assert (graphs.statistics().pinned_bytes > 0) == ("cuda_graph_packed_offload" in options)


def test_layers_are_recomputed_inside_graphs(monkeypatch):
    """The backward finds documents again."""
    calls, checkpoint = [], recompute.checkpoint
    monkeypatch.setattr(recompute, "checkpoint", lambda *args, **named: calls.append(1) or checkpoint(*args, **named))
    let_recompute = partial(let_whole_layers_be_recomputed, **FULL["each layer"])
    with replaying(new_delta_nets(), ANY, before_capture=let_recompute):
        assert calls


def test_gradients_are_added_to_main_grad():
    model = new_delta_nets()
    assert_adds_to_main_grads(model, [pack((100, 180)), pack((300,))], lambda: graphs_on(model, pack(WARMUP)))


def test_offsets_that_upstream_refuses_are_refused_in_its_words(model, graphs):
    before = replayed(graphs)
    short, unlike = pack((100, 180)), pack((100, 180))
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        setattr(short["packed_seq_params"], name, ends((100, 170)))
    unlike["packed_seq_params"].cu_seqlens_kv = ends((150, 130))
    with pytest.raises(ValueError, match="does not match"):
        model(**short)
    with pytest.raises(AssertionError, match="cu_seqlens_q equals to cu_seqlens_kv"):
        model(**unlike)
    assert replayed(graphs) == before


def test_nothing_stands_in_for_upstreams_functions_outside_of_captures(model, graphs):
    assert (
        gated_delta_net.GatedDeltaNet._resolve_cu_seqlens
        is model.decoder.layers[0].self_attention._resolve_cu_seqlens.__func__
    )
    documents = ends((3, 70))
    assert index.prepare_chunk_indices(documents, 64).tolist() == [[0, 0], [1, 0], [1, 1]]
    assert index.prepare_chunk_indices(documents, 64) is index.prepare_chunk_indices(documents, 64)


@pytest.mark.parametrize(
    "field, value, packs, why",
    [
        ("deterministic_mode", True, True, "take no packs with model.deterministic_mode=true"),
        ("deterministic_mode", True, False, "copy from the host with model.deterministic_mode=true"),
        ("context_parallel_size", 2, True, "not compared with eager under context parallelism"),
    ],
)
def test_what_they_cannot_do_is_refused_with_its_reason(bare, monkeypatch, field, value, packs, why):
    monkeypatch.setattr(bare.config, field, value)
    with pytest.raises(OptionError, match=why):
        TransformerBlockFamily(bare.decoder, packs)


def test_packs_need_a_release_that_does_not_divide_them(bare, monkeypatch):
    monkeypatch.setattr(gated_delta_net, "_unpack_sequence", None, raising=False)
    with pytest.raises(OptionError, match=r"need megatron-core 0\.19"):
        TransformerBlockFamily(bare.decoder)


def test_other_kinds_are_refused(bare, monkeypatch):
    net = bare.decoder.layers[0].self_attention
    monkeypatch.setattr(net, "__class__", type("GatedDeltaNet2", (type(net),), {}))
    with pytest.raises(OptionError, match="one has GatedDeltaNet2"):
        TransformerBlockFamily(bare.decoder)
    with pytest.raises(OptionError, match="no graphs of such layers were tried: GatedDeltaNet2"):
        TransformerBlockFamily(bare.decoder, packs=False)
