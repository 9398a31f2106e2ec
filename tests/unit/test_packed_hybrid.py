"""A Mamba-Transformer hybrid on graphs of packed documents, against eager, through the reference executor."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks import between as pack_indices
from bridge_cg_plugin.upstream.hooks.helpers.constructors import decoder_helpers

from .hybrids import hybrid_pack, new_hybrid, stand_ins
from .packs import EXPERTS, WARMUP, ends, graphs_on, replaying, unpacked

TWO = [hybrid_pack(WARMUP), hybrid_pack((30, 180, 77))]
PACKS = [
    *TWO,
    hybrid_pack((1, 90, 30, 100, 60, 20)),  # as many as captured
    hybrid_pack((40, 0, 250)),
    hybrid_pack((120, 150), repeats=9),
]
# Text that is padded to one length, and embeddings of images in it.
ROWS = [unpacked(tokens) for tokens in (96, 128, 70, 5)]
PADDED = {"cuda_graph_max_packed_seqs": None, "seq_length": 256}
WITH_EXPERTS = {"pattern": "ME*EM", **EXPERTS}
PARTS = {
    # A tape shows whether a replay reads the angles of another batch.
    "all layers, rotated": ({"rotary": True}, PACKS, {}, 1),
    "a padded row": ({}, [unpacked(96)], {"cuda_graph_max_packed_seqs": None}, 1),
    "rows of any length, rotated": ({"rotary": True}, ROWS, PADDED, 1),
    "rows of any length, experts": (WITH_EXPERTS, ROWS, {**PADDED, "cuda_graph_modules": []}, 1),
    "rows, all but experts": (WITH_EXPERTS, ROWS, {**PADDED, "cuda_graph_modules": ["attn", "moe_router", "mamba"]}, 5),
    "mamba and attention": ({}, TWO, {"cuda_graph_modules": ["attn", "mamba"]}, 3),
    "mamba and MLP": ({}, TWO, {"cuda_graph_modules": ["mlp", "mamba"]}, 3),
    "all parts are one": ({}, TWO, {"cuda_graph_modules": ["attn", "mlp", "mamba"]}, 1),
    "all but Mamba": ({}, TWO, {"cuda_graph_modules": ["attn", "mlp"]}, 2),
    "experts": (WITH_EXPERTS, TWO, {"cuda_graph_modules": []}, 1),
    "all but experts": (WITH_EXPERTS, TWO, {"cuda_graph_modules": ["attn", "moe_router", "mamba"]}, 5),
}


@pytest.fixture(scope="module", autouse=True)
def kernels():
    with stand_ins():
        yield


@pytest.fixture(scope="module")
def bare():
    """A model that tests put graphs of their own on."""
    return new_hybrid()


@pytest.mark.parametrize("layers, batches, options, regions", PARTS.values(), ids=PARTS)
def test_batches_parts_and_experts(layers, batches, options, regions):
    with replaying(new_hybrid(**layers), batches, **options) as graphs:
        assert len(graphs._regions) == regions


def test_a_pack_without_indices_runs_eager_and_is_counted(bare):
    arguments = hybrid_pack((100, 180))
    with graphs_on(bare, hybrid_pack(WARMUP)) as graphs:
        arguments["packed_seq_params"].seq_idx = None
        bare(**arguments)
        assert graphs.statistics().fallbacks == {"no_seq_idx": 1}


def test_other_mixers_are_refused(bare, monkeypatch):
    bare.config.cuda_graph_max_packed_seqs = 4
    mixer = bare.decoder.layers[0].mixer
    with monkeypatch.context() as changed:
        changed.setattr(mixer, "__class__", type("NewMixer", (type(mixer),), {}))
        with pytest.raises(OptionError, match="NewMixer"):
            decoder_helpers([bare], bare.config, num_microbatches=1)


def test_a_step_on_graphs_finds_the_indices_as_upstream_does(bare, monkeypatch):
    """Without upstream's call that waits for the device; whatever upstream alone can say stays upstream's."""
    called = []
    original = torch.repeat_interleave
    monkeypatch.setattr(torch, "repeat_interleave", lambda *args: called.append(1) or original(*args))

    def found(offsets, tokens, **more):
        called.clear()
        return PackedSeqParams(cu_seqlens_q=offsets, total_tokens=tokens, **more).seq_idx, len(called)

    given = [(ends((3, 0, 5)), 8), (ends((3, 5)), 12), (ends((3, 5), repeats=4), 8), (ends((3, 9)), 8)]
    beyond = [(torch.tensor([0, 5, 3], dtype=torch.int32), 8)]
    with monkeypatch.context() as changed:
        changed.setattr(pack_indices, "active_graphs", list)
        upstreams = [found(*pair) for pair in (*given, *beyond)]
    assert all(calls == 1 for _, calls in upstreams)
    with graphs_on(bare, hybrid_pack(WARMUP), capture=False):
        ours = [found(*pair) for pair in (*given, *beyond)]
        assert found(ends((3, 5)), 9, cu_seqlens_q_padded=ends((4, 5)))[0].tolist() == [[0] * 4 + [1] * 5]
        assert found(ends((3, 5)), None) == (None, 0)
    assert [calls for _, calls in ours] == [0, 0, 0, 0, 1]
    for (a, _), (b, _) in zip(ours, upstreams, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
