"""Kernels on a GPU beside what they stand in for: PyTorch's and Transformer Engine's."""

import pytest
import torch
from torch.nn import functional as F

ROWS = (4, 784, 2304)
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
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("value", [1.0, -0.7265625, 3.140625])
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


@pytest.mark.parametrize("width", [WIDTH, 4 * WIDTH])
@pytest.mark.parametrize("rows", ROWS)
def test_layernorm_backward_is_no_farther_from_fp64_than_transformer_engines(rows, width):
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch as tex

    from bridge_cg_plugin.vision.kernels.layernorm import layernorm_backward

    gradient, x, residual, weight, bias = (
        draw(rows, width),
        draw(rows, width),
        draw(rows, width),
        draw(width),
        draw(width),
    )
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


def run(tower_module, model, grads, batch):
    grads.zero()
    outputs = tower_module.step(model, batch)
    return outputs, grads.copy()


@pytest.mark.parametrize("modules", [(), ("attn",), ("mlp",)], ids=["whole", "attn", "mlp"])
def test_fast_kernels_train_as_eager(tower_module, model, grads, graphs_of, modules):
    helper = graphs_of(buckets=(784, 1024), modules=modules, kernels="fast")
    for grid in (GRID, [(1, 12, 16), (4, 10, 14)]):
        batch = tower_module.make_batch(grid, model)
        with helper.graphs.paused():
            expected, first = run(tower_module, model, grads, batch)
            _, second = run(tower_module, model, grads, batch)
        outputs, replayed = run(tower_module, model, grads, batch)
        noise = tower_module.largest_relative(second, first)
        assert tower_module.largest_relative(outputs, expected) == 0.0
        assert tower_module.largest_relative(replayed, first) <= max(1.5 * noise, 5e-3)
    assert not helper.graphs.statistics().fallbacks


@pytest.mark.parametrize("trained", ["merger", "layers.1.mlp", "bias", "norm"])
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


def test_fast_kernels_without_main_grad(tower_module, model, graphs_of):
    batch = tower_module.make_batch(GRID, model)

    def gradients():
        model.zero_grad()
        tower_module.step(model, batch)
        return [p.grad.clone() for p in model.parameters()]

    helper = graphs_of(buckets=(784,), kernels="fast")
    with helper.graphs.paused():
        expected = gradients()
    assert tower_module.largest_relative(gradients(), expected) <= 3e-2
    assert helper.graphs.statistics().replays == 1


def test_fast_kernels_with_lora(tower_module, model, graphs_of):
    from megatron.bridge.peft.lora import LoRA

    LoRA(target_modules=["linear_qkv", "linear_fc1"], dim=8, alpha=8, dropout=0.0)(model, training=True)
    model.cuda().bfloat16().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_out" in name:
                parameter.normal_(std=0.02)
    grads = tower_module.MainGrads(model)
    helper = graphs_of(buckets=(784,), kernels="fast")
    batch = tower_module.make_batch(GRID, model)
    with helper.graphs.paused():
        expected, eager = run(tower_module, model, grads, batch)
    outputs, replayed = run(tower_module, model, grads, batch)
    assert tower_module.largest_relative(outputs, expected) == 0.0
    assert tower_module.largest_relative(replayed, eager) <= 3e-2


def test_fast_kernels_launch_fewer(tower_module, model, grads, graphs_of):
    from scripts.performance import measure

    counts = {}
    batch = tower_module.make_batch(GRID, model)
    for kernels in ("exact", "fast"):
        helper = graphs_of(buckets=(784,), kernels=kernels)
        tower_module.step(model, batch)
        found = measure.profile(lambda: tower_module.step(model, batch))
        counts[kernels] = {name: calls for name, (_, calls) in found.by_name.items()}
        helper.delete_cuda_graphs()
    layers = len(model.decoder.layers)
    fast = counts["fast"]
    assert fast["_layernorm_backward"] == 2 * layers + len(model.decoder.deepstack_merger_list) + 1
    # The gradients that a merger adds to: the last layer's, and those of the tapped layers.
    assert (
        fast["_column_partials"] <= len(model.decoder.deepstack_merger_list) + 1 < counts["exact"]["_column_partials"]
    )
    assert not any("ln_bwd" in name for name in fast)
    assert sum(fast.values()) <= sum(counts["exact"].values()) - 4 * layers
