"""FlashAttention's kernels: as near to fp32 as cuDNN's, zeros in padding, right in graphs and in the tower."""

import pytest
import torch

from tests.models.reference import ALLOWANCE

from .test_direct_attention import LAYOUTS, RECORDED, WIDTH, by_transformer_engine, distance, draw, offsets_of

SCALE = WIDTH**-0.5
# One kind of cuDNN's kernels is the measure for the other kind's, on random numbers.
NEAR = 1.05


@pytest.fixture(scope="module", autouse=True)
def flash():
    from bridge_cg_plugin.upstream.encoders.direct_attention import flash_attention_refusal

    pytest.importorskip("flash_attn.cute", reason="needs requirements/flash.txt")
    assert flash_attention_refusal() is None
    from bridge_cg_plugin.upstream.encoders import flash_attention

    return flash_attention


def by_flash(flash, parts, gradient, offsets, largest):
    out = flash.flash_attention(*parts, offsets, largest, SCALE)
    return out.detach(), torch.autograd.grad(out, parts, gradient)


def plainly(parts, gradient, lengths):
    """Return output and gradients of attention inside segments, `[sum(lengths), heads, width]` each."""
    parts = [part.detach().requires_grad_() for part in parts]
    outs, used = [], sum(lengths)
    for query, key, value in zip(*(part[:used].split(lengths) for part in parts), strict=True):
        weights = torch.einsum("qhd,khd->hqk", query, key).mul(query.shape[-1] ** -0.5).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, value))
    out = torch.cat(outs)
    return (out.detach(), *(g[:used] for g in torch.autograd.grad(out, parts, gradient[:used])))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 72, 80, 96])
def test_the_package_agrees_with_fp32(flash, width, dtype):
    assert flash.takes(width, dtype) and flash.agrees(width, dtype, 0)


def test_as_released_it_does_not(flash, monkeypatch):
    """What the plugin sets up is needed; where this fails, a release needs it no more."""
    import contextlib

    monkeypatch.setattr(flash, "_suited", lambda interface, width: contextlib.nullcontext())
    assert flash._distance_from_fp32(72, torch.bfloat16, torch.device("cuda")) > 10 * flash.AGREES


@pytest.mark.parametrize("layout", LAYOUTS)
def test_as_near_to_fp32_as_cudnns(flash, layout):
    lengths, (segments, largest), rows = LAYOUTS[layout]
    parts, gradient = draw(lengths, rows)
    offsets, used = offsets_of(lengths, segments), sum(lengths)
    plain = plainly([part.float() for part in parts], gradient.float(), tuple(lengths))
    cudnn = by_transformer_engine(parts, gradient, offsets, largest)
    out, found = by_flash(flash, parts, gradient, offsets, largest)
    for ours, theirs, exact in zip((out, *found), (cudnn[0], *cudnn[1]), plain, strict=True):
        near, far = distance([ours[:used]], [exact]), distance([theirs[:used]], [exact])
        assert near <= NEAR * far, (layout, near, far)
    assert not any(x[used:].count_nonzero() for x in (out, *found))


@pytest.mark.parametrize("layout", RECORDED)
def test_a_recorded_call_follows_its_offsets(flash, layout):
    from bridge_cg_plugin.graphs.recordings.capture import capture_graph

    lengths, others, segments, rows = RECORDED[layout]
    parts, gradient = draw(lengths, rows)
    offsets = offsets_of(lengths, segments)
    by_flash(flash, parts, gradient, offsets, rows)
    graph = torch.cuda.CUDAGraph()
    with capture_graph(graph, torch.cuda.graph_pool_handle(), torch.cuda.Stream()):
        out, found = by_flash(flash, parts, gradient, offsets, rows)
    for layout in (others, lengths):
        offsets.copy_(offsets_of(layout, segments))
        graph.replay()
        expected, gradients = by_flash(flash, parts, gradient, offsets_of(layout, segments), rows)
        assert torch.equal(out, expected)
        assert distance(found, gradients) <= 2e-3
        assert not any(x[sum(layout) :].count_nonzero() for x in (out, *found))


def test_many_layouts_write_nothing_outside(flash):
    """Buffers of a graph's pool lie side by side; here every tensor that the kernels write has a guarded neighbour."""
    generator = torch.Generator().manual_seed(5)
    guards = [torch.full((1 << 20,), 3.0, device="cuda") for _ in range(8)]
    for _ in range(20):
        lengths = torch.randint(1, 1200, (int(torch.randint(1, 9, (1,), generator=generator)),), generator=generator)
        rows = int(lengths.sum()) + int(torch.randint(0, 300, (1,), generator=generator))
        parts, gradient = draw(lengths.tolist(), rows)
        out, found = by_flash(flash, parts, gradient, offsets_of(lengths.tolist(), 8), int(lengths.max()))
        plain = plainly([part.float() for part in parts], gradient.float(), tuple(lengths.tolist()))
        used = int(lengths.sum())
        assert distance([x[:used] for x in (out, *found)], plain) <= flash.AGREES, lengths
        guards.append(torch.full((rows * 64,), 3.0, device="cuda"))
    assert all(bool((guard == 3.0).all()) for guard in guards)


@pytest.mark.first
def test_a_tower_is_as_near_to_fp32_as_eager(tower_module, model, grads, graphs_of, monkeypatch, flash):
    import statistics

    from tests.models.reference import Fp32Tower

    from .test_precision import mean_errors

    calls = []
    original = flash.flash_attention
    monkeypatch.setattr(flash, "flash_attention", lambda *args: (calls.append(args[4]), original(*args))[1])
    helper = graphs_of(buckets=(1024, 2048), max_frames=48, attention="flash")
    assert calls and helper.graphs.workload.attention == "flash"
    for grid in ([(1, 28, 28)], [(1, 32, 32)], [(1, 40, 36), (1, 20, 20)], [(8, 10, 14)]):
        batches = [tower_module.make_batch(grid, model, seed=seed) for seed in range(3)]
        with helper.graphs.paused():
            tower_module.forward(model, batches[0])
            reference = Fp32Tower(model)
            expected = [reference.step(batch) for batch in batches]
            eager_outputs, eager = mean_errors(model, grads, batches, expected)
        outputs, errors = mean_errors(model, grads, batches, expected)
        exact = [o for found, _ in expected for o in found]
        assert distance(outputs, exact) <= ALLOWANCE * distance(eager_outputs, exact), grid
        for figure in (statistics.median, statistics.fmean):
            assert figure(errors) <= ALLOWANCE * figure(eager), (grid, figure.__name__)
    assert not helper.graphs.statistics().fallbacks
