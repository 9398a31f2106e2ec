"""Bicubic samples of a table of position embeddings, in Triton's interpreter, beside PyTorch's."""

from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from bridge_cg_plugin.upstream.encoders import glm45v
from bridge_cg_plugin.vision.kernels import bicubic
from bridge_cg_plugin.vision.kernels.bicubic import takes
from tests.scripts import computed

SCRIPT = """
from bridge_cg_plugin.vision.kernels.bicubic import bicubic_samples

found = []
for table, points, gradient in cases:
    out = bicubic_samples(table.requires_grad_(), points)
    found.append((out.detach(), *torch.autograd.grad(out, table, gradient)))
"""
# Sides of the table, points, channels.
CASES = [((5, 5), 20, 24), ((4, 9), 2, 300), ((24, 24), 9, 8), ((3, 3), 1, 1)]


def make_case(sides, points, channels):
    torch.manual_seed(points)
    table = torch.randn(1, channels, *sides)
    if points % 2:
        table = table.contiguous(memory_format=torch.channels_last)
    places = torch.rand(2, points, 1, 1).permute(3, 1, 2, 0) * 2.4 - 1.2  # outside, too
    places[0, 0, 0], places[0, -1, 0] = torch.tensor([-1.0, 1.0]), torch.tensor([1.0, -1.0])
    return table, places, torch.randn(1, channels, points, 1)


def test_samples_and_gradients_are_pytorchs():
    cases = [make_case(*case) for case in CASES]
    for (table, points, gradient), (out, spread) in zip(cases, computed(SCRIPT, cases), strict=True):
        table.requires_grad_()
        expected = F.grid_sample(table, points, mode="bicubic", padding_mode="border", align_corners=False)
        torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(spread, torch.autograd.grad(expected, table, gradient)[0], rtol=1e-5, atol=1e-5)


def test_only_single_points_of_one_fp32_image_are_taken():
    table, points, _ = make_case(*CASES[0])
    assert takes(table, points)
    assert not takes(table.bfloat16(), points)
    assert not takes(table.expand(2, -1, -1, -1), points.expand(2, -1, -1, -1))
    assert not takes(table, points.view(1, 10, 2, 2))
    assert not takes(table[:, :, :1], points)


def test_glm_samples_its_embeddings_by_the_kernel_and_nothing_else(monkeypatch):
    modeling = pytest.importorskip("transformers.models.glm4v.modeling_glm4v")
    taken = []
    monkeypatch.setattr(glm45v, "kernels_available", lambda: True)
    monkeypatch.setattr(bicubic, "bicubic_samples", lambda table, points: taken.append(table.shape))
    table, points, _ = make_case(*CASES[0])
    before = F.grid_sample
    wanted = {"mode": "bicubic", "padding_mode": "border", "align_corners": False}
    with glm45v.recording_kernels([]):
        assert modeling.F.grid_sample is not before
        for settings in (wanted, {**wanted, "mode": "bilinear"}, {**wanted, "align_corners": True}):
            assert torch.equal(modeling.F.grid_sample(table, points, **settings), before(table, points, **settings))
        on_device = mock.Mock(wraps=table, is_cuda=True, dtype=table.dtype, shape=table.shape)
        modeling.F.grid_sample(on_device, points, **wanted)
    assert F.grid_sample is before and taken == [table.shape]
