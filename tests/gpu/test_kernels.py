"""Kernels on a GPU beside what they stand in for: PyTorch's and Transformer Engine's."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from .test_parity import run

WIDTH, MLP = 1152, 4304
GRID = [(1, 28, 28)]


def draw(*shape):
    return torch.randn(shape, device="cuda").bfloat16()


def backward(function, leaves, gradient):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return torch.autograd.grad(function(*leaves), leaves, gradient)


def gelu_after(x, bias):
    return F.gelu(x + bias, approximate="tanh")


def same(a, b):
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("value", [-0.7265625, 3.140625])
def test_gelu_of_every_bf16_value_rounds_as_pytorchs(value):
    from bridge_cg_plugin.vision.kernels.bias import bias_gelu

    x = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16).view(torch.bfloat16).view(64, 1024)
    bias, gradient = x.new_zeros(1024), torch.full_like(x, value)
    assert same(bias_gelu(x, bias), gelu_after(x, bias))
    found, expected = (backward(f, [x, bias], gradient)[0] for f in (bias_gelu, gelu_after))
    assert same(found, expected)


@pytest.mark.first
@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize("in_fp32", [False, True], ids=["bf16", "fp32"])
def test_rotation_of_a_language_model_equals_bridges(packed, in_fp32):
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import apply_rotary_pos_emb_absolute

    from bridge_cg_plugin.upstream.kernels.rotary import _Rotation

    config = SimpleNamespace(apply_rope_fusion=False, apply_rotary_pos_emb_in_fp32=in_fp32, rotary_interleaved=False)
    rows, offsets = ((1024,), torch.tensor([0, 300, 1024], device="cuda")) if packed else ((512, 2), None)
    half = torch.rand(*rows[:1], *(rows[1:] or (1,)), 1, 64, device="cuda") * 1000
    angles, t, gradient = torch.cat((half, half), -1), draw(*rows, 16, 128), draw(*rows, 16, 128)
    rotate = _Rotation(apply_rotary_pos_emb_absolute).rotated
    ours, theirs = (
        (f(t, angles, config, offsets), *backward(lambda t, f=f: f(t, angles, config, offsets), [t], gradient))
        for f in (rotate, apply_rotary_pos_emb_absolute)
    )
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("trained", ["merger", pytest.param("layers.1.mlp", marks=pytest.mark.first), "norm"])
def test_fast_kernels_with_frozen_parts(tower_module, model, graphs_of, trained):
    for name, parameter in model.named_parameters():
        parameter.requires_grad = trained in name
    grads = tower_module.MainGrads(model)
    helper = graphs_of(buckets=(784,), kernels="fast")
    batch = tower_module.make_batch(GRID, model)
    with helper.graphs.paused():
        expected, eager = run(tower_module, model, grads, batch)
    outputs, replayed = run(tower_module, model, grads, batch)
    assert tower_module.largest_relative(outputs, expected) == 0.0
    assert tower_module.largest_relative(replayed, eager) <= 3e-2
    assert helper.graphs.statistics().replays == 1


def test_fast_kernels_take_additions_along(tower_module, model, grads, graphs_of, monkeypatch):
    """No layer's norm goes to Transformer Engine, and its additions to the residual stream are left to kernels."""
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch as tex

    from bridge_cg_plugin.vision.kernels.residual import ResidualStream

    calls = []
    for owner, name in ((tex, "layernorm_bwd"), (ResidualStream, "leave")):
        original = getattr(owner, name)

        def call(*args, original=original, name=name, **kwargs):
            if torch.cuda.is_current_stream_capturing():
                calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)
    graphs_of(buckets=(784,), kernels="fast", slots=1).delete_cuda_graphs()  # layers' first passes are over
    calls.clear()
    graphs_of(buckets=(784,), kernels="fast", slots=1)
    # Mergers' norms call the function by another name.
    assert calls and set(calls) == {"leave"} and len(calls) % (2 * len(model.decoder.layers)) == 0
