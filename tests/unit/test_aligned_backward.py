"""Linear layers whose backward is another one, with the same gradients."""

import pytest
import torch
from torch import nn

from bridge_cg_plugin.upstream.encoders import packed_towers
from bridge_cg_plugin.upstream.encoders.packed_towers import _aligned_forward, _gains_by_alignment

from .towers import assert_close

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
    with packed_towers.reordering_kernels([model]):
        assert not any("forward" in vars(linear) for linear in model)
    monkeypatch.setattr(packed_towers, "has_kernels", lambda tensor: True)
    with packed_towers.reordering_kernels([model]):
        assert ["forward" in vars(linear) for linear in model] == [True, False]
        found = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    assert_close(found, expected, TOLERANCE)
