"""Attention inside segments by kernels called directly, cuDNN's and FlashAttention's, in graphs and in the tower.

cuDNN's give Transformer Engine's bits in outputs and its noise in gradients; FlashAttention's are as near to fp32. Both
leave zeros in padding.
"""

import contextlib

import pytest
import torch

from tests.models.reference import ALLOWANCE

from .test_parity import check_mixes, check_nearness

HEADS, WIDTH = 16, 72
SCALE = WIDTH**-0.5
# One kind of cuDNN's kernels is the measure for the other kind's, on random numbers.
NEAR = 1.05
# Segments, bounds (segments, largest), rows.
LAYOUTS = {
    "exact": ([784, 300, 16], (3, 784), 1100),
    "padding and missing segments": ([400, 4], (8, 640), 640),
    "one": ([500], (1, 640), 640),
    "a bucket's": ([2304, 144, 1200], (8, 3392), 6720),
}
# Segments, others of the same graph, how many places for segments, rows.
RECORDED = {"several": ([300, 200, 12], [40, 400], 4, 512), "one": ([784], [300], 1, 784)}


@pytest.fixture(scope="module")
def cudnn():
    """Return what attends by cuDNN's kernels."""
    # First: it may load another copy of cuDNN than the package does, and both work in this order only.
    import transformer_engine.pytorch  # noqa: F401

    pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
    from bridge_cg_plugin.vision.kernels import cudnn_attention as ours

    def attend(parts, gradient, offsets, largest):
        query, key, value = parts
        plans = ours.plans_for(query, offsets.shape[0] - 1, largest, SCALE)
        out = ours.segment_attention(query, key, value, ours.locate_segments(offsets, HEADS, WIDTH), plans)
        return out.detach(), *torch.autograd.grad(out, parts, gradient)

    return attend


@pytest.fixture(scope="module")
def flash_attention():
    from bridge_cg_plugin.upstream.encoders.direct_attention import flash_attention_refusal

    pytest.importorskip("flash_attn.cute", reason="needs requirements/flash.txt")
    assert flash_attention_refusal() is None
    from bridge_cg_plugin.upstream.encoders import flash_attention

    return flash_attention


@pytest.fixture(scope="module")
def flash(flash_attention):
    """Return what attends by FlashAttention's kernels."""

    def attend(parts, gradient, offsets, largest):
        out = flash_attention.flash_attention(*parts, offsets, largest, SCALE)
        return out.detach(), *torch.autograd.grad(out, parts, gradient)

    return attend


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
    return out.detach(), *torch.autograd.grad(out, parts, gradient)


def plainly(parts, gradient, lengths):
    """Return output and gradients of attention in fp32 inside segments, `[sum(lengths), heads, width]` each."""
    parts = [part.detach().float().requires_grad_() for part in parts]
    outs, used = [], sum(lengths)
    for query, key, value in zip(*(part[:used].split(tuple(lengths)) for part in parts), strict=True):
        weights = torch.einsum("qhd,khd->hqk", query, key).mul(SCALE).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, value))
    out = torch.cat(outs)
    return out.detach(), *(g[:used] for g in torch.autograd.grad(out, parts, gradient[:used].float()))


def distance(found, expected):
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cudnns_are_transformer_engines(cudnn, layout):
    lengths, (segments, largest), rows = LAYOUTS[layout]
    parts, gradient = draw(lengths, rows)
    offsets, used = offsets_of(lengths, segments), sum(lengths)
    first, second = (by_transformer_engine(parts, gradient, offsets, largest) for _ in range(2))
    found = cudnn(parts, gradient, offsets, largest)
    assert torch.equal(found[0][:used], first[0][:used])
    wanted, again, ours = ([each[:used] for each in result[1:]] for result in (first, second, found))
    assert distance(ours, wanted) <= max(2 * distance(again, wanted), 1e-3)
    assert not any(x[used:].count_nonzero() for x in found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flash_attentions_are_as_near_to_fp32_as_cudnns(flash, layout):
    lengths, (segments, largest), rows = LAYOUTS[layout]
    parts, gradient = draw(lengths, rows)
    offsets, used = offsets_of(lengths, segments), sum(lengths)
    plain = plainly(parts, gradient, lengths)
    cudnns, found = (by(parts, gradient, offsets, largest) for by in (by_transformer_engine, flash))
    for ours, theirs, exact in zip(found, cudnns, plain, strict=True):
        near, far = distance([ours[:used]], [exact]), distance([theirs[:used]], [exact])
        assert near <= NEAR * far, (layout, near, far)
    assert not any(x[used:].count_nonzero() for x in found)


def test_as_released_it_does_not(flash_attention, monkeypatch):
    """What the plugin sets up is needed; where this fails, a release needs it no more."""
    monkeypatch.setattr(flash_attention, "_suited", lambda interface, width: contextlib.nullcontext())
    far = flash_attention._distance_from_fp32(72, torch.bfloat16, torch.device("cuda"))
    assert far > 10 * flash_attention.AGREES


def test_many_layouts_write_nothing_outside(flash, flash_attention):
    """Buffers of a graph's pool lie side by side; here every tensor that the kernels write has a guarded neighbour."""
    generator = torch.Generator().manual_seed(5)
    guards = [torch.full((1 << 20,), 3.0, device="cuda") for _ in range(8)]
    for _ in range(10):
        segments = int(torch.randint(1, 9, (1,), generator=generator))
        lengths = torch.randint(1, 1200, (segments,), generator=generator).tolist()
        used = sum(lengths)
        rows = used + int(torch.randint(0, 300, (1,), generator=generator))
        parts, gradient = draw(lengths, rows)
        found = flash(parts, gradient, offsets_of(lengths, 8), max(lengths))
        assert distance([x[:used] for x in found], plainly(parts, gradient, lengths)) <= flash_attention.AGREES
        guards.append(torch.full((rows * 64,), 3.0, device="cuda"))
    assert all(bool((guard == 3.0).all()) for guard in guards)


@pytest.mark.parametrize("layout", RECORDED)
@pytest.mark.parametrize("kernels", ["cudnn", "flash"])
def test_a_recorded_call_follows_its_offsets(request, kernels, layout):
    from bridge_cg_plugin.graphs.recordings.capture import capture_graph

    attend = request.getfixturevalue(kernels)
    lengths, others, segments, rows = RECORDED[layout]
    parts, gradient = draw(lengths, rows)
    offsets = offsets_of(lengths, segments)
    attend(parts, gradient, offsets, rows)
    graph = torch.cuda.CUDAGraph()
    with capture_graph(graph, torch.cuda.graph_pool_handle(), torch.cuda.Stream()):
        found = attend(parts, gradient, offsets, rows)
    for layout in (others, lengths):
        offsets.copy_(offsets_of(layout, segments))
        graph.replay()
        expected = attend(parts, gradient, offsets_of(layout, segments), rows)
        assert torch.equal(found[0], expected[0])
        assert distance(found[1:], expected[1:]) <= 2e-3
        assert not any(x[sum(layout) :].count_nonzero() for x in found)


@pytest.mark.first
def test_mixes_replayed_with_cudnns(cudnn, tower_module, model, grads, graphs_of, monkeypatch):
    from bridge_cg_plugin.vision.kernels.cudnn_attention import _SegmentAttention

    calls, original = [], _SegmentAttention.apply
    monkeypatch.setattr(_SegmentAttention, "apply", lambda *args: (calls.append(args[4]), original(*args))[1])
    # An autograd graph that lives on has gradient accumulators of the default stream.
    alive = tower_module.forward(model, tower_module.make_batch([(1, 16, 16)], model))
    helper = graphs_of(buckets=(768, 2048), max_frames=48, attention="cudnn", kernels="exact")
    assert calls and all(o.requires_grad for o in alive)
    check_mixes(tower_module, model, grads, helper)


@pytest.mark.first
def test_a_tower_with_flash_attentions(flash_attention, tower_module, model, grads, graphs_of, monkeypatch):
    calls, original = [], flash_attention.flash_attention
    monkeypatch.setattr(flash_attention, "flash_attention", lambda *args: (calls.append(args[4]), original(*args))[1])
    helper = graphs_of(buckets=(1024, 2048), max_frames=48, attention="flash")
    assert calls and helper.graphs.workload.kernels.attention == "flash"
    grids = [(1, 28, 28)], [(1, 32, 32)], [(1, 40, 36), (1, 20, 20)], [(8, 10, 14)]

    def near(outputs, eagers, exact):
        print(f"outputs from fp32: {distance(outputs, exact):.2e}, eager's {distance(eagers, exact):.2e}")
        return distance(outputs, exact) <= ALLOWANCE * distance(eagers, exact)

    check_nearness(tower_module, model, grads, helper, {str(grid): grid for grid in grids}, near)
