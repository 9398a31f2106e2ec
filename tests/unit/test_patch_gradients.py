"""Convolutions of patches and linear layers whose backward is another one, with the same gradients."""

import pytest
import torch
from torch import nn

from bridge_cg_plugin.upstream.encoders import packed_towers
from bridge_cg_plugin.upstream.encoders.packed_towers import _aligned_forward, _gains_by_alignment
from bridge_cg_plugin.upstream.encoders.qwen3_vl import patch_gradients, takes_patches

from .towers import assert_close

SHAPE = (3, 2, 4, 4)


def make(kind=nn.Conv3d, kernel=SHAPE[1:], **options):
    torch.manual_seed(0)
    return kind(SHAPE[0], 24, kernel, **{"stride": kernel, **options})


def results(module, patches, gradient):
    module.zero_grad()
    out = module(patches)
    out.backward(gradient)
    return [out.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind,kernel", [(nn.Conv3d, SHAPE[1:]), (nn.Conv2d, SHAPE[2:])])
def test_gradients_are_the_convolutions(kind, kernel, bias):
    module = make(kind, kernel, bias=bias)
    patches = torch.randn(40, SHAPE[0], *kernel)
    gradient = torch.randn(40, 24, *(1 for _ in kernel))
    expected = results(module, patches, gradient)
    with patch_gradients((nn.Sequential(module),)):
        found = results(module, patches, gradient)
        assert module(patches).grad_fn.name() == "_PatchConvolutionBackward"
    assert "forward" not in vars(module)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1:], expected[1:])


def test_what_autocast_casts_is_differentiated_outside_of_it():
    module, patches = make(), torch.randn(40, *SHAPE)
    with torch.autocast("cpu", torch.bfloat16), patch_gradients((module,)):
        found = module(patches)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(patches)
    gradients = [torch.autograd.grad(out.sum(), list(module.parameters())) for out in (found, expected)]
    assert torch.equal(found, expected) and all(map(torch.equal, *gradients))


@pytest.mark.parametrize(
    "patches", [torch.randn(2, 3, 4, 4, 4), torch.randn(5, *SHAPE).requires_grad_()], ids=["larger", "differentiable"]
)
def test_other_inputs_are_pytorchs(patches):
    module = make()
    with patch_gradients((module,)):
        assert module(patches).grad_fn.name() == "ConvolutionBackward0"


@pytest.mark.parametrize(
    "options", [{"stride": 1}, {"padding": 1}, {"padding": "valid"}, {"dilation": 2}, {"groups": 3}], ids=str
)
def test_other_convolutions_are_left_alone(options):
    assert takes_patches(make())
    assert not takes_patches(make(**options))
    assert not takes_patches(nn.Linear(3, 3))


TOLERANCE = 1e-6


@pytest.mark.parametrize(("outputs", "inputs"), [(50, 32), (32, 50), (13, 7), (16, 24)])
@pytest.mark.parametrize("bias", [False, True])
def test_an_aligned_backward_is_the_linear_layers(outputs, inputs, bias):
    linear, x = nn.Linear(inputs, outputs, bias=bias), torch.randn(20, inputs, requires_grad=True)
    assert _gains_by_alignment(linear) == (outputs % 8 != 0 or inputs % 8 != 0)
    found, expected = _aligned_forward(linear, x), linear(x)
    assert torch.equal(found, expected)
    wanted, weight = [x, *linear.parameters()], torch.randn(20, outputs)
    gradients = [torch.autograd.grad((y * weight).sum(), wanted) for y in (found, expected)]
    assert_close(*gradients, TOLERANCE)


def test_an_aligned_backward_computes_what_is_asked_for():
    linear, x = nn.Linear(7, 13), torch.randn(4, 7)
    linear.weight.requires_grad = False
    _aligned_forward(linear, x).sum().backward()
    assert linear.weight.grad is None and torch.equal(linear.bias.grad, torch.full((13,), 4.0))


@pytest.mark.parametrize("shape", [(5, 8), (1, 5, 8)])
def test_linear_layers_with_a_bias_are_swapped_where_there_are_kernels(shape, monkeypatch):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False)), torch.randn(shape, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    with packed_towers.aligned_backward([model]):
        assert not any("forward" in vars(linear) for linear in model)
    monkeypatch.setattr(packed_towers, "has_kernels", lambda tensor: True)
    with packed_towers.aligned_backward([model]):
        assert ["forward" in vars(linear) for linear in model] == [True, False]
        found = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    assert_close(found, expected, TOLERANCE)
