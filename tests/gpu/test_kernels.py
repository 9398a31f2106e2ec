"""Kernels on a GPU beside what they stand in for: PyTorch's and Transformer Engine's."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from .test_parity import run

ROWS = (4, 784)
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


@pytest.mark.parametrize("rows", ROWS)
def test_gelu_and_the_biass_gradient(rows):
    from bridge_cg_plugin.vision.kernels.bias import bias_gelu

    x, bias, gradient = draw(rows, MLP), draw(MLP), draw(rows, MLP)
    found, expected = (backward(f, [x, bias], gradient) for f in (bias_gelu, gelu_after))
    assert torch.equal(found[0], expected[0])
    exact = expected[0].double().sum(0)
    assert (found[1].double() - exact).norm() <= 3e-3 * exact.norm()


@pytest.mark.first
@pytest.mark.parametrize("rounds", [False, True], ids=["glm45v", "pixtral"])
def test_rotation_rounds_as_hugging_faces(rounds):
    from transformers.models.glm4v.modeling_glm4v import apply_rotary_pos_emb_vision
    from transformers.models.pixtral.modeling_pixtral import apply_rotary_pos_emb

    from bridge_cg_plugin.upstream.encoders.packed_towers import Rotation

    upstreams = apply_rotary_pos_emb if rounds else apply_rotary_pos_emb_vision
    angles = torch.rand(784, 40, device="cuda") * 6
    tables = [table.to(torch.bfloat16 if rounds else torch.float32) for table in (angles.cos(), angles.sin())]
    rotation = Rotation.of(*(torch.cat((table, table), 1) for table in tables), rounds=rounds)
    others = {"unsqueeze_dim": 1} if rounds else {}
    query, key = draw(784, 3, 16, 80).unbind(1)[:2]
    gradients = draw(784, 16, 80), draw(784, 16, 80)
    assert rotation.halves is not None
    found = rotation.apply(upstreams, query, key, **others)
    assert all(map(torch.equal, found, upstreams(query, key, *rotation.upstreams, **others)))
    ours, theirs = (
        backward(turn, [query, key], gradients)
        for turn in (
            lambda q, k: rotation.apply(upstreams, q, k, **others),
            lambda q, k: upstreams(q, k, *rotation.upstreams, **others),
        )
    )
    assert all(map(torch.equal, ours, theirs))


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


@pytest.mark.first
@pytest.mark.parametrize("rows", ROWS)
def test_rmsnorm_backward_is_no_farther_from_fp64_than_hugging_faces(rows):
    from transformers.models.pixtral.modeling_pixtral import PixtralRMSNorm

    from bridge_cg_plugin.vision.kernels.norms import rmsnorm_backward

    norm = PixtralRMSNorm(WIDTH, eps=1e-5).cuda().bfloat16()
    x, weight, gradient = draw(rows, WIDTH), draw(WIDTH), draw(rows, WIDTH)
    norm.weight.data.copy_(weight)
    inputs = x.detach().requires_grad_()
    theirs = torch.autograd.grad(norm(inputs), [inputs, norm.weight], gradient)
    exact = backward(lambda x, w: F.rms_norm(x, (WIDTH,), w, 1e-5), [x.double(), weight.double()], gradient.double())
    for ours, other, wanted in zip(rmsnorm_backward(gradient, x, weight, 1e-5), theirs, exact, strict=True):
        assert (ours.double() - wanted).norm() <= 1.02 * (other.double() - wanted).norm()


@pytest.mark.parametrize(("rows", "width"), [(4, WIDTH), (784, WIDTH), (784, 4 * WIDTH)])
def test_layernorm_backward_is_no_farther_from_fp64_than_transformer_engines(rows, width):
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch as tex

    from bridge_cg_plugin.vision.kernels.norms import layernorm_backward

    gradient, x, residual = (draw(rows, width) for _ in range(3))
    weight, bias = draw(width), draw(width)
    _, mean, rstd = tex.layernorm_fwd(x, weight, bias, 1e-6, None, None, tex.DType.kBFloat16, 0, False)
    exact = backward(
        lambda x, w, b: F.layer_norm(x, (width,), w, b, 1e-6),
        [x.double(), weight.double(), bias.double()],
        gradient.double(),
    )
    theirs = tex.layernorm_bwd(gradient, x, mean, rstd, weight, 0, False)
    ours = layernorm_backward(gradient, x, mean, rstd, weight)
    for a, b, e in zip((ours.x, ours.weight, ours.bias), theirs, exact, strict=True):
        assert (a.double() - e).norm() <= 1.01 * (b.double() - e).norm()
    added = layernorm_backward(gradient, x, mean, rstd, weight, residual=residual)
    assert torch.equal(added.x, ours.x + residual)
    total = added.x.double().sum(0)
    assert (added.x_sum.double() - total).norm() <= 3e-3 * total.norm()


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


def test_sums_that_wait_equal_those_that_do_not():
    from bridge_cg_plugin.vision.kernels.reduction import TOGETHER, column_sum, deferred_sums

    matrices = [draw(784, WIDTH) for _ in range(TOGETHER + 3)]
    expected = [column_sum(x, torch.bfloat16) for x in matrices]
    with deferred_sums(()):
        found = [column_sum(x, torch.bfloat16, deferred=True) for x in matrices]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_position_embeddings_are_sampled_with_pytorchs_bits():
    from bridge_cg_plugin.vision.kernels.bicubic import bicubic_samples

    def by_pytorch(table):
        return F.grid_sample(table, places, mode="bicubic", padding_mode="border", align_corners=False)

    table = draw(24, 24, 1536).permute(2, 0, 1)[None].float()
    places = torch.rand(1, 5000, 1, 2, device="cuda") * 2 - 1
    gradient = torch.randn(5000, 1536, device="cuda").t()[None, :, :, None]
    assert torch.equal(bicubic_samples(table, places), by_pytorch(table))
    (found,) = backward(lambda table: bicubic_samples(table, places), [table], gradient)
    (expected,) = backward(by_pytorch, [table], gradient)  # by atomics, in any order
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
