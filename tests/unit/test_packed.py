"""A GPT model's decoder on graphs of packed documents, against eager, through the reference executor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bridge_cg_plugin.attention_bounds import pack_buckets
from bridge_cg_plugin.cli.planner.command import place
from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.language.packed.batch import OFFSETS, pack_batch
from bridge_cg_plugin.upstream.decoder import block
from bridge_cg_plugin.upstream.decoder.block import TransformerBlockFamily
from bridge_cg_plugin.upstream.wrappers import MAX_SEQLENS

from ..main_grads import hook_main_grads, reduced
from .packs import (
    WARMUP,
    assert_same,
    eager,
    ends,
    graphs_on,
    losses_and_gradients,
    new_model,
    new_qwen,
    pack,
    replayed,
    replaying,
    unpacked,
    with_images,
)
from .towers import poison


@pytest.fixture(scope="module")
def model():
    return new_model()


@pytest.fixture(scope="module")
def bare():
    """A model that tests put graphs of their own on."""
    return new_model()


@pytest.fixture(scope="module")
def graphs(model, executor_kind):
    with graphs_on(model, pack(WARMUP)) as made:
        yield made


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 600), min_size=1, max_size=9))
def test_the_planner_places_a_pack_where_the_runtime_replays_it(graphs, lengths):
    (region,) = graphs._regions
    tokens, offsets = sum(lengths), ends(lengths)
    angles = torch.zeros(tokens, 1, 1, region.program.layout.rotated)
    batch = pack_batch(torch.zeros(tokens, 1, 1), angles, dict.fromkeys(OFFSETS, offsets), {}, Tensor.tolist)
    buckets = pack_buckets((320, 512), 6)
    assert place(tuple(lengths), buckets) == region.choose(batch)
    assert region.buckets == tuple(buckets)


lengths_of_packs = st.lists(st.integers(0, 300), min_size=1, max_size=6).filter(lambda n: 257 <= sum(n) <= 512)


@pytest.mark.both_executors
@settings(max_examples=30)
@given(lengths_of_packs, st.integers(0, 9), st.integers(0, 600))
def test_any_pack_from_one_capture(model, graphs, lengths, repeats, bound):
    """Some documents may have no tokens, the last offset repeats, and the longest may be less than is told."""
    arguments = pack(lengths, repeats=repeats, max_seqlen=max(*lengths, min(bound, sum(lengths)), 0))
    expected = eager(model, graphs, arguments)
    before = replayed(graphs)
    poison(graphs, float("nan"))
    assert_same(losses_and_gradients(model, arguments), expected)
    assert replayed(graphs) == before + 1


FALLBACKS = {
    "too_many_documents": pack((50,) * 7),
    "too_many_tokens": pack((513,)),
    "too_few_tokens": pack((60, 40)),
    "other_layout": pack((100, 150), room=(110, 160)),
    "unpacked_batch": unpacked(),
    "call_arguments": pack((100, 200)),
}
FALLBACKS["call_arguments"]["packed_seq_params"].pad_between_seqs = True


@pytest.mark.parametrize("reason", FALLBACKS)
def test_a_batch_that_no_graph_takes_runs_eager_and_is_counted(model, graphs, reason):
    expected = eager(model, graphs, FALLBACKS[reason])
    before = graphs.statistics().fallbacks[reason]
    losses, gradients = losses_and_gradients(model, FALLBACKS[reason])
    assert graphs.statistics().fallbacks[reason] == before + 1
    assert torch.equal(losses, expected[0])
    assert all(map(torch.equal, gradients, expected[1]))


def test_documents_with_padding_between_them(bare):
    lengths = {(90, 191): (96, 194), (290,): (300,), (1, 100, 64): (8, 104, 200), (0, 0): (100, 200)}
    with replaying(bare, [pack(each, room=room) for each, room in lengths.items()]) as graphs:
        losses_and_gradients(bare, pack((100, 160)))
        assert graphs.statistics().fallbacks == {"other_layout": 1}


def test_padded_offsets_that_are_the_others_are_no_padding(model, graphs):
    arguments = pack((100, 160))
    params = arguments["packed_seq_params"]
    params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded = params.cu_seqlens_q, params.cu_seqlens_kv
    before = replayed(graphs)
    model(**arguments)
    assert replayed(graphs) == before + 1


def test_fused_rotary_positions_are_the_documents(model, monkeypatch):
    """With upstream's fused kernel a table of as many rows as tokens goes by the documents, too."""
    family, longest = TransformerBlockFamily(model.decoder), dict.fromkeys(MAX_SEQLENS, 200)
    assert family.by_place(300, 300, longest)
    monkeypatch.setattr(model.config, "apply_rope_fusion", True)
    assert not family.by_place(300, 300, longest)


def test_a_pack_whose_last_places_have_no_angles_runs_eager(model, graphs, monkeypatch):
    """Upstream repeats the last angles there, where it is told how long documents are."""
    monkeypatch.setattr(graphs.workload.family, "by_place", lambda *_: True)
    before = graphs.statistics().fallbacks.get("call_arguments", 0)
    model(**pack((100, 200)))
    assert graphs.statistics().fallbacks["call_arguments"] == before + 1


@pytest.mark.parametrize("change", [lambda a: a.double(), lambda a: a[:, 0], lambda a: (a, a)])
def test_angles_of_another_kind_run_eager(model, graphs, change):
    params, hidden = pack((300,))["packed_seq_params"], torch.zeros(300, 1, 32)
    kwargs = {"hidden_states": hidden, "rotary_pos_emb": torch.zeros(300, 1, 1, 8), "packed_seq_params": params}
    assert graphs.workload.read(**kwargs).refusal is None
    kwargs["rotary_pos_emb"] = change(kwargs["rotary_pos_emb"])
    assert graphs.workload.read(**kwargs).refusal == "call_arguments"


def test_the_width_of_heads_is_looked_at(bare, monkeypatch):
    """Some releases of cuDNN have wrong gradients of wide ones (`seams/test_transformer_engine.py`)."""
    widths = []
    monkeypatch.setattr(block, "warn_of_gradients", widths.append)
    with graphs_on(bare, capture=False):
        assert widths == [bare.config.kv_channels]


def test_without_a_pack_in_warm_up_nothing_is_captured(bare):
    with graphs_on(bare, unpacked(), cuda_graph_packed_strict=False) as graphs:
        assert not graphs.captured and "no packed microbatch was seen" in graphs.report()
        bare(**pack((300,)))
        assert graphs.statistics().fallbacks == {"capture_failed": 1}
    with pytest.raises(CaptureError, match="no packed microbatch"), graphs_on(bare):
        pass


@pytest.mark.parametrize("new, modules", [(new_model, ["attn"]), (new_qwen, [])], ids=["GPT", "Qwen3-VL"])
def test_detaching_leaves_the_decoder_as_it_was(new, modules):
    fresh = new()
    before = dict(vars(fresh.decoder))
    warmup = with_images(pack(WARMUP)) if new is new_qwen else pack(WARMUP)
    with graphs_on(fresh, warmup, cuda_graph_modules=modules):
        assert "forward" in vars(fresh.decoder)
    after = vars(fresh.decoder)
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


def noting(forward, seen):
    """Return a linear module's forward that first notes how it would add its weight's gradient."""

    def noted(self, *args, **kwargs):
        if hasattr(self, "is_first_microbatch"):
            seen.append((self.fuse_wgrad_accumulation, self.is_first_microbatch))
        return forward(self, *args, **kwargs)

    return noted


@pytest.mark.parametrize("modules, fused", [([], None), (["attn"], True), (["mlp"], False)], ids=str)
def test_weight_gradients_are_added_inside_products_of_recorded_work_only(monkeypatch, modules, fused):
    """Products are Transformer Engine's on a GPU; these have its attributes alone."""
    fresh = new_model()
    products = [module for module in fresh.decoder.modules() if "Parallel" in type(module).__name__]
    seen = []
    for product in products:
        product.fuse_wgrad_accumulation, product.is_first_microbatch = False, True
    fresh.nodes = hook_main_grads(product.weight for product in products)
    for kind in {type(product) for product in products}:
        monkeypatch.setattr(kind, "forward", noting(kind.forward, seen))
    options = {} if fused is None else {"cuda_graph_packed_gradient_accumulation_fusion": fused}
    with reduced(), graphs_on(fresh, pack(WARMUP), cuda_graph_modules=modules, **options) as graphs:
        assert (False, True) in seen and ((True, False) in seen) == (fused is not False)
        assert (True, True) not in seen and (False, False) not in seen
        seen.clear()
        with graphs.paused():
            fresh(**pack(WARMUP))
        assert {*seen} == {(False, True)}
    assert products and not any(product.fuse_wgrad_accumulation for product in products)


@pytest.fixture(scope="module")
def qwen():
    return new_qwen()


@pytest.mark.parametrize("modules", [[], ["attn"]], ids=["whole", "attn"])
def test_qwen3_vl_with_image_features(qwen, modules):
    batches = [
        with_images(pack((100, 160))),
        with_images(pack((300,)), every=3, seed=1),
        with_images(pack((20, 90, 180)), features=0),
    ]
    with replaying(qwen, batches, cuda_graph_modules=modules):
        pass


def test_more_image_features_than_were_captured(qwen):
    with graphs_on(qwen, with_images(pack((100, 160)), features=0)) as graphs:
        losses_and_gradients(qwen, with_images(pack((100, 160))))
        assert graphs.statistics().fallbacks == {"other_layout": 1}
