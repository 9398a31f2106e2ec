"""A Mamba-Transformer hybrid on graphs of packed documents, against eager, through the reference executor."""

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from bridge_cg_plugin.options import OptionError
from bridge_cg_plugin.upstream.hooks import between as pack_indices
from bridge_cg_plugin.upstream.hooks.helpers.constructors import decoder_helpers

from .hybrids import hybrid_pack, new_hybrid, stand_ins
from .packs import EXPERTS, WARMUP, assert_same, eager, ends, graphs_on, losses_and_gradients, replayed, unpacked

PACKS = {
    "as many as captured": hybrid_pack((1, 90, 30, 100, 60, 20)),
    "a document of no tokens": hybrid_pack((40, 0, 250)),
    "repeated offsets": hybrid_pack((120, 150), repeats=9),
}


@pytest.fixture(scope="module", autouse=True)
def kernels():
    with stand_ins():
        yield


@pytest.fixture(scope="module")
def model(executor_kind):
    """Rotate on the tape, which shows whether a replay reads the angles of another batch."""
    return new_hybrid(rotary=executor_kind == "tape")


@pytest.fixture(scope="module")
def graphs(model, executor_kind):
    with graphs_on(model, hybrid_pack(WARMUP)) as made:
        yield made


@pytest.fixture(scope="module")
def bare():
    """A model that tests put graphs of their own on."""
    return new_hybrid()


def assert_replays_are_eagers(model, graphs, arguments):
    expected = eager(model, graphs, arguments)
    before = replayed(graphs)
    found = losses_and_gradients(model, arguments)
    assert replayed(graphs) == before + len(graphs._regions)
    assert_same(found, expected)


@pytest.mark.parametrize("name", PACKS)
def test_losses_and_gradients_are_eagers(model, graphs, name):
    assert_replays_are_eagers(model, graphs, PACKS[name])


def test_a_padded_row(bare):
    expected = losses_and_gradients(bare, unpacked(96))
    with graphs_on(bare, unpacked(96), cuda_graph_max_packed_seqs=None) as graphs:
        assert_same(losses_and_gradients(bare, unpacked(96)), expected)
        assert replayed(graphs) == 1


WITH_EXPERTS = {"pattern": "ME*EM", **EXPERTS}
PARTS = {
    "mamba and attention": ({}, ["attn", "mamba"], 3),
    "mamba and MLP": ({}, ["mlp", "mamba"], 3),
    "all parts are one": ({}, ["attn", "mlp", "mamba"], 1),
    "all but Mamba": ({}, ["attn", "mlp"], 2),
    "experts": (WITH_EXPERTS, [], 1),
    "all but experts": (WITH_EXPERTS, ["attn", "moe_router", "mamba"], 5),
}


@pytest.mark.parametrize("layers, modules, regions", PARTS.values(), ids=PARTS)
def test_parts_and_experts(layers, modules, regions):
    model = new_hybrid(**layers)
    expected = losses_and_gradients(model, hybrid_pack((30, 180, 77)))
    with graphs_on(model, hybrid_pack(WARMUP), cuda_graph_modules=modules) as graphs:
        found = losses_and_gradients(model, hybrid_pack((30, 180, 77)))
        assert len(graphs._regions) == replayed(graphs) == regions
    assert_same(found, expected)
    assert not any("forward" in vars(layer) for layer in model.decoder.layers)


def without_indices(batch):
    batch["packed_seq_params"].seq_idx = None
    return batch


def test_a_pack_without_indices_runs_eager_and_is_counted(model, graphs):
    before = graphs.statistics().fallbacks["no_seq_idx"]
    losses_and_gradients(model, without_indices(hybrid_pack((100, 180))))
    assert graphs.statistics().fallbacks["no_seq_idx"] == before + 1


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
