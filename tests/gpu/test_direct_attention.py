"""cuDNN called directly: Transformer Engine's bits in outputs, its noise in gradients, zeros in padding."""

import pytest
import torch

from .test_parity import MIXES, check_mixes

HEADS, WIDTH = 16, 72
# Segments, bounds (segments, largest), rows.
LAYOUTS = {
    "exact": ([784, 300, 16], (3, 784), 1100),
    "padding and missing segments": ([400, 4], (8, 640), 640),
    "one": ([500], (1, 640), 640),
    "a bucket's": ([2304, 144, 1200], (8, 3392), 6720),
}
# Segments, others of the same graph, how many places for segments, rows.
RECORDED = {"several": ([300, 200, 12], [40, 400], 4, 512), "one": ([784], [300], 1, 784)}


@pytest.fixture(scope="module", autouse=True)
def cudnn_package():
    pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")


def offsets_of(lengths, segments):
    ends = torch.tensor([0, *lengths, *[0] * (segments - len(lengths))]).cumsum(0)
    return ends.to("cuda", torch.int32)


def draw(lengths, rows):
    generator = torch.Generator(device="cuda").manual_seed(3)
    used = sum(lengths)
    mixed = 1.5 * torch.randn(rows, HEADS, 3, WIDTH, device="cuda", generator=generator).bfloat16()
    mixed[used:] = 100.0
    gradient = torch.randn(rows, HEADS, WIDTH, device="cuda", generator=generator).bfloat16()
    return [part.detach().requires_grad_() for part in mixed.unbind(2)], gradient


def by_transformer_engine(parts, gradient, offsets, largest):
    import transformer_engine.pytorch as te

    attention = te.DotProductAttention(HEADS, WIDTH, attention_dropout=0.0)
    out = attention(
        *parts,
        qkv_format="thd",
        attn_mask_type="padding",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=largest,
        max_seqlen_kv=largest,
    ).view(gradient.shape)
    return out.detach(), torch.autograd.grad(out, parts, gradient)


def directly(parts, gradient, offsets, largest):
    from bridge_cg_plugin.vision.kernels.segment_attention import locate_segments, plans_for, segment_attention

    query, key, value = parts
    plans = plans_for(query, offsets.shape[0] - 1, largest, WIDTH**-0.5)
    out = segment_attention(query, key, value, locate_segments(offsets, HEADS, WIDTH), plans)
    return out.detach(), torch.autograd.grad(out, parts, gradient)


def distance(found, expected):
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_as_through_transformer_engine(layout):
    lengths, (segments, largest), rows = LAYOUTS[layout]
    parts, gradient = draw(lengths, rows)
    offsets, used = offsets_of(lengths, segments), sum(lengths)
    expected, first = by_transformer_engine(parts, gradient, offsets, largest)
    _, second = by_transformer_engine(parts, gradient, offsets, largest)
    out, found = directly(parts, gradient, offsets, largest)
    assert torch.equal(out[:used], expected[:used])
    noise = distance([g[:used] for g in second], [g[:used] for g in first])
    assert distance([g[:used] for g in found], [g[:used] for g in first]) <= max(2 * noise, 1e-3)
    assert not any(x[used:].count_nonzero() for x in (out, *found))


def test_gradients_lie_as_the_projections_output():
    from bridge_cg_plugin.vision.kernels.segment_attention import lie_interleaved

    parts, gradient = draw([100, 60], 200)
    _, found = directly(parts, gradient, offsets_of([100, 60], 2), 128)
    assert lie_interleaved(*found)


@pytest.mark.parametrize("layout", RECORDED)
def test_a_recorded_call_follows_its_offsets(layout):
    from bridge_cg_plugin.graphs.recordings.capture import capture_graph

    lengths, others, segments, rows = RECORDED[layout]
    parts, gradient = draw(lengths, rows)
    offsets = offsets_of(lengths, segments)
    directly(parts, gradient, offsets, rows)
    graph = torch.cuda.CUDAGraph()
    with capture_graph(graph, torch.cuda.graph_pool_handle(), torch.cuda.Stream()):
        out, found = directly(parts, gradient, offsets, rows)
    for layout in (others, lengths):
        offsets.copy_(offsets_of(layout, segments))
        graph.replay()
        expected, gradients = directly(parts, gradient, offsets_of(layout, segments), rows)
        assert torch.equal(out, expected)
        assert distance(found, gradients) <= 2e-3
        assert not any(x[sum(layout) :].count_nonzero() for x in (out, *found))


@pytest.mark.first
def test_mixes_replayed_with_direct_attention(tower_module, model, grads, graphs_of, monkeypatch):
    from bridge_cg_plugin.vision.kernels import segment_attention

    calls = []
    original = segment_attention._SegmentAttention.apply
    monkeypatch.setattr(
        segment_attention._SegmentAttention, "apply", lambda *args: (calls.append(args[4]), original(*args))[1]
    )
    # An autograd graph that lives on has gradient accumulators of the default stream.
    alive = tower_module.forward(model, tower_module.make_batch([(1, 16, 16)], model))
    helper = graphs_of(buckets=(768, 2048), max_frames=48, attention="cudnn", kernels="exact")
    assert calls and all(o.requires_grad for o in alive)
    check_mixes(tower_module, model, grads, helper)
    batch = tower_module.make_batch(MIXES["video and images"], model)
    model.eval()
    with torch.no_grad():
        outputs = tower_module.forward(model, batch)
        with helper.graphs.paused():
            expected = tower_module.forward(model, batch)
    assert tower_module.largest_relative(outputs, expected) == 0.0
    assert not helper.graphs.statistics().fallbacks


def test_fewer_and_shorter_kernels_than_through_transformer_engine(tower_module, model, grads, graphs_of):
    """The scan over rows that are not there and the zero fills are gone."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    def kernels(attention):
        helper = graphs_of(buckets=(2048,), max_frames=8, attention=attention)
        batch = tower_module.make_batch([(8, 16, 16)], model)
        tower_module.step(model, batch)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(5):
                tower_module.step(model, batch)
            torch.cuda.synchronize()
        found = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
        helper.delete_cuda_graphs()
        scans = [e.time_range.elapsed_us() for e in found if "dot_do_o" in e.name]
        print(f"{attention}: scans of {scans} us")
        return scans, sum("FillFunctor" in e.name for e in found)

    scans, fills = kernels("transformer_engine")
    fewer_scans, fewer_fills = kernels("cudnn")
    # The shortest of each: a GPU that idled before runs the others at lower clocks.
    assert 0 < min(fewer_scans) < min(scans) / 4
    assert fewer_fills < fills
