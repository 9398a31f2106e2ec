"""Encoders beside Qwen3-VL's on real graphs: replays are eager's, training goes as eager's.

The numbers behind every assertion are printed (`pytest -s`).
"""

import pytest
import torch

from tests.models.encoder_case import forward, step
from tests.models.encoders import ENCODERS

from .common import host_may_not_wait, poison, vision_graphs
from .test_parity import MIXES

LAYERS = 4
BUCKETS = (768, 1024, 1536, 2048)
IMAGES = 4096  # patches of an image
TILE = 1088  # what a tile counts
COUNTS = {f"{count} images": count for count in (1, 2, 3, 4, 5, 6, 7, 8)}
# Encoders that know no video: GLM-4.5V's gets its frames as images.
FRAMES = {name: [(1, h, w) for t, h, w in rows for _ in range(t)] for name, rows in MIXES.items()}
PATCHES = {"buckets": BUCKETS, "max_frames": 48}
PACKED = ("qwen25_vl", "glm45v", "qwen25_omni", "qwen3_omni")  # attend in packed segments
AUDIO = "qwen3_omni_audio"
# Frames of clips: chunks have 100, windows 800.
CLIPS = {
    "a chunk": [100],
    "a window": [800],
    "half a minute": [3000],
    "short and long": [37, 1950, 120, 800],
    "many": [210, 90, 100, 430, 1, 640, 99, 101, 320, 8],
    "longest": [6000, 2500],
}
SIZES = {
    **dict.fromkeys(("qwen35_vl", *PACKED), (MIXES, PATCHES)),
    **dict.fromkeys(("glm45v", "ministral3"), (FRAMES, PATCHES)),
    AUDIO: (CLIPS, {"buckets": tuple(16 * n for n in (1, 8, 24, 32, 64, 96)), "max_frames": 48}),
    "siglip": (COUNTS, {"buckets": tuple(IMAGES * n for n in (1, 2, 4, 6, 8))}),
    "nemotron_vl": (COUNTS, {"buckets": tuple(TILE * n for n in (1, 2, 4, 6, 8))}),
    "nemotron_omni": (FRAMES, {"buckets": (832, 1088, 1600, 2816), "max_frames": 48}),  # class tokens among them
}
# Gradients of padded microbatches may round otherwise in bf16 by so much, where eager repeats itself.
NOISE_FLOOR = 2e-3
# A replay may be this much farther from fp32 than eager.
ALLOWANCE = 1.05


class Encoder:
    """An encoder under test with its gradients in `main_grad`."""

    def __init__(self, name, tower_module):
        self.kind, self.tower = ENCODERS[name], tower_module
        self.model = self.kind.build(LAYERS)
        self.grads = tower_module.MainGrads(self.model)
        self.sizes, self.options = SIZES[name]

    def batch(self, size, seed=1):
        return self.kind.make_batch(self.model, size, seed)

    def run(self, batch):
        self.grads.zero()
        outputs = step(self.kind, self.model, batch)
        said = self.kind.compared(self.model)
        return outputs, [g for g, each in zip(self.grads.copy(), said, strict=True) if each]

    def differ(self, actual, expected):
        return self.tower.largest_relative(actual, expected)

    def on_graphs(self, **options):
        return vision_graphs(self.model, **{"kernels": "exact", **self.options, **options})


@pytest.fixture
def encoder(request, tower_module):
    made = Encoder(request.param, tower_module)
    yield made
    made.__dict__.clear()
    torch.cuda.empty_cache()


def encoders(*cases):
    """Parametrize with encoders, or with encoders and what graphs are asked for."""
    return pytest.mark.parametrize(
        ("encoder", "options"),
        [pytest.param(name, options, id="-".join([name, *options.values()])) for name, options in cases],
        indirect=["encoder"],
    )


def check_evaluation(encoder, helper, batch, near):
    """Compare an evaluation on a graph with eager.

    Args:
        near: Whether outputs, the first argument, are as near to eager's as they should be.
    """
    encoder.model.eval()
    with torch.no_grad():
        with helper.graphs.paused():
            expected = forward(encoder.kind, encoder.model, batch)
        outputs = forward(encoder.kind, encoder.model, batch)
    assert near(outputs, expected)
    assert sum(b.evaluations for b in helper.graphs.statistics().buckets.values()) == 1
    assert not helper.graphs.statistics().fallbacks
    helper.delete_cuda_graphs()


def check_host(encoder, batch):
    """Run a step in which the host may not wait."""
    step(encoder.kind, encoder.model, batch)
    with host_may_not_wait():
        step(encoder.kind, encoder.model, batch)


@pytest.mark.first
@encoders(*((name, {}) for name in ("qwen35_vl", "siglip", "nemotron_omni", "nemotron_vl")))
def test_replays_equal_eager_to_the_bit(encoder, options):
    helper = encoder.on_graphs(**options)
    for name, size in encoder.sizes.items():
        batch = encoder.batch(size, seed=len(name))
        with helper.graphs.paused():
            expected, first = encoder.run(batch)
            _, second = encoder.run(batch)
        noise = encoder.differ(second, first)
        print(f"{name}: eager from eager {noise:.1e}", flush=True)  # before a replay that may end the process
        poison(helper.graphs)
        outputs, replayed = encoder.run(batch)
        found = encoder.differ(replayed, first)
        print(f"{name}: outputs {encoder.differ(outputs, expected):.1e}, gradients {found:.1e}", flush=True)
        assert encoder.differ(outputs, expected) == 0.0, name
        assert found <= max(1.5 * noise, NOISE_FLOOR), name
    batch = encoder.batch(next(iter(encoder.sizes.values())))
    if encoder.kind in (ENCODERS["siglip"], ENCODERS["nemotron_vl"]):
        check_host(encoder, batch)
    check_evaluation(encoder, helper, batch, lambda found, eager: encoder.differ(found, eager) <= 2e-2)


# Fast kernels attend by cuDNN's where segments are long, exact ones by PyTorch's.
NEAR = [
    *((name, {"kernels": "fast"}) for name in (*PACKED, "ministral3", AUDIO)),
    *((name, {"kernels": "exact"}) for name in ("qwen25_vl", "ministral3", AUDIO)),
    *((name, {"attention": "flash"}) for name in ("qwen25_vl", "qwen3_omni")),
]


@pytest.mark.first
@encoders(*NEAR)
def test_replays_are_as_near_to_fp32_as_eager(encoder, options):
    if "attention" in options:
        pytest.importorskip("flash_attn.cute", reason="needs its package")
    reference = encoder.kind.reference(encoder.kind, encoder.model)
    said = encoder.kind.compared(encoder.model)
    helper = encoder.on_graphs(**options)
    attention = helper.graphs.workload.kernels.attention
    assert attention == options.get("attention", attention)
    for name, size in encoder.sizes.items():
        batch = encoder.batch(size, seed=len(name))
        exact, exact_gradients = reference.step(batch)
        exact_gradients = [g for g, each in zip(exact_gradients, said, strict=True) if each]
        with helper.graphs.paused():
            expected, first = encoder.run(batch)
        poison(helper.graphs)
        outputs, replayed = encoder.run(batch)
        eager_errors = [encoder.tower.relative(g, e) for g, e in zip(first, exact_gradients, strict=True)]
        errors = [encoder.tower.relative(g, e) for g, e in zip(replayed, exact_gradients, strict=True)]
        eager_output, output = (encoder.differ(found, exact) for found in (expected, outputs))
        mean, eager_mean = sum(errors) / len(errors), sum(eager_errors) / len(eager_errors)
        print(
            f"{name}: from fp32, outputs {output:.2e} (eager {eager_output:.2e}), gradients {mean:.2e} "
            f"({eager_mean:.2e}), worst {max(errors):.2e} ({max(eager_errors):.2e}); "
            f"from eager {encoder.differ(outputs, expected):.1e}, gradients {encoder.differ(replayed, first):.1e}"
        )
        assert output <= ALLOWANCE * eager_output, name
        assert mean <= ALLOWANCE * eager_mean, name
    batch = encoder.batch(next(iter(encoder.sizes.values())))
    check_host(encoder, batch)
    exact, _ = reference.step(batch)
    near = lambda found, eager: encoder.differ(found, exact) <= ALLOWANCE * encoder.differ(eager, exact)  # noqa: E731
    check_evaluation(encoder, helper, batch, near)
