"""Attention of Hugging Face's encoders: cuDNN's as near to fp32 as PyTorch's packed kernels, zeros in padding."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bridge_cg_plugin.attention_bounds import cudnn_pays
from bridge_cg_plugin.vision.kernels.packed_attention import PackedSegments, masked_attention, taken_apart

from .test_segment_attention import offsets_of

# Heads and the size of one: Ministral 3, Qwen3-Omni, Qwen2.5-VL, GLM-4.5V.
HEADS = {"ministral3": (16, 64), "qwen3_omni": (16, 72), "qwen25": (16, 80), "glm45v": (12, 128)}
# Segments, bounds (segments, largest), rows: the last ones of no length, and rows behind all.
LAYOUTS = {
    "one, padded": ([900], (1, 1024), 1024),
    "several": ([784, 300, 16], (3, 784), 1100),
    "missing": ([1024, 4], (8, 1024), 2048),
    "none": ([], (8, 1024), 1024),
}
# One kind of kernels is the measure for the other kind's, on random numbers.
NEAR = 1.05


@pytest.fixture(scope="module", autouse=True)
def cudnn_package():
    # First: it may load another copy of cuDNN than the package does, and both work in this order only.
    import transformer_engine.pytorch  # noqa: F401

    pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
    from bridge_cg_plugin.upstream.encoders.direct_attention import segment_attention_refusal

    assert segment_attention_refusal() is None


class Case:
    """Random projections, their rotation and the gradient of what attends."""

    def __init__(self, heads, width, lengths, bounds, rows, joint=True, dtype=torch.bfloat16):
        from bridge_cg_plugin.upstream.encoders.packed_towers import rotation

        generator = torch.Generator(device="cuda").manual_seed(3)

        def draw(*shape):
            return torch.randn(shape, device="cuda", generator=generator)

        mixed = (1.5 * draw(rows, 3, heads, width)).to(dtype)
        mixed[sum(lengths) :] = 100.0
        sources = (mixed,) if joint else tuple(part.contiguous() for part in mixed.unbind(1))
        self.sources = tuple(source.requires_grad_() for source in sources)
        self.gradient = draw(rows, heads, width).to(dtype)
        self.rotation = rotation(6 * draw(rows, width // 2))
        self.segments = PackedSegments(offsets_of(lengths, bounds[0]), bounds[1])
        self.scale, self.used = width**-0.5, sum(lengths)

    def by(self, attend):
        """Return the output and the gradients of queries, keys and values; a pass computes its own offsets."""
        from bridge_cg_plugin.upstream.encoders.tower_attention import Projected

        segments = replace(self.segments, offsets=self.segments.offsets.clone())
        out = attend(Projected(self.sources, None, self.rotation, segments, self.scale))
        gradients = torch.autograd.grad(out, self.sources, self.gradient)
        return [out.detach(), *taken_apart(gradients)]

    def exactly(self):
        """Return the same, in fp32."""
        from bridge_cg_plugin.vision.kernels.rotary import apply_rotary

        sources = tuple(source.detach().float().requires_grad_() for source in self.sources)
        query, key, value = taken_apart(sources)
        query, key = (apply_rotary(part, *self.rotation.halves) for part in (query, key))
        with sdpa_kernel(SDPBackend.MATH):
            out = masked_attention(query, key, value, self.segments.offsets, self.scale)
        gradients = torch.autograd.grad(out, sources, self.gradient.float())
        return [out.detach(), *taken_apart(gradients)]


@pytest.fixture
def by_cudnn(monkeypatch):
    """Return what attends by cuDNN's kernels, and fails where it would not."""
    from bridge_cg_plugin.upstream.encoders import tower_attention
    from bridge_cg_plugin.upstream.encoders.direct_attention import Located

    def refuse(*args):
        raise AssertionError("attended by PyTorch's kernels")

    monkeypatch.setattr(tower_attention, "packed_attention", refuse)
    return partial(tower_attention._attend_by_cudnn, Located())


def by_pytorch(projected):
    from bridge_cg_plugin.upstream.encoders import tower_attention
    from bridge_cg_plugin.vision.kernels import packed_attention

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tower_attention, "packed_attention", packed_attention.packed_attention)
        return tower_attention.attend(projected)


def distance(found, expected):
    return float((found.float() - expected).norm() / expected.norm().clamp(min=1e-6))


@pytest.mark.parametrize(
    ("encoder", "layout", "joint", "dtype"),
    [
        *((encoder, layout, True, torch.bfloat16) for encoder in HEADS for layout in ("one, padded", "several")),
        *(("qwen3_omni", layout, False, torch.bfloat16) for layout in LAYOUTS),
        ("qwen25", "several", True, torch.float16),
    ],
    ids=str,
)
def test_as_near_to_fp32_as_pytorchs(by_cudnn, encoder, layout, joint, dtype):
    case = Case(*HEADS[encoder], *LAYOUTS[layout], joint, dtype)
    assert cudnn_pays(*LAYOUTS[layout][1], LAYOUTS[layout][2])
    exact, found, others = case.exactly(), case.by(by_cudnn), case.by(by_pytorch)
    for name, ours, theirs, wanted in zip(("out", "query", "key", "value"), found, others, exact, strict=True):
        assert not ours[case.used :].count_nonzero(), name
        if case.used:
            near, far = (distance(each[: case.used], wanted[: case.used]) for each in (ours, theirs))
            print(f"{name}: cuDNN's {near:.2e} from fp32, PyTorch's {far:.2e}")
            assert near <= NEAR * far, (name, near, far)


def test_a_recorded_call_follows_its_offsets(by_cudnn):
    from bridge_cg_plugin.graphs.recordings.capture import capture_graph

    layouts = ([1024, 200, 12], [40, 400], [2048])
    case = Case(16, 72, layouts[0], (4, 2048), 2048)
    case.by(by_cudnn)
    graph = torch.cuda.CUDAGraph()
    with capture_graph(graph, torch.cuda.graph_pool_handle(), torch.cuda.Stream()):
        found = case.by(by_cudnn)
    for lengths in (layouts[1], layouts[2], layouts[0]):
        case.segments.offsets.copy_(offsets_of(lengths, 4))
        graph.replay()
        expected = case.by(by_cudnn)
        assert torch.equal(found[0], expected[0])
        assert all(distance(ours, theirs.float()) <= 2e-3 for ours, theirs in zip(found, expected, strict=True))
        assert not any(each[sum(lengths) :].count_nonzero() for each in found)
