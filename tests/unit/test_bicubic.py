"""Bicubic samples of a table of position embeddings, in Triton's interpreter, beside PyTorch's."""

import pytest
import torch
from torch.nn import functional as F

from bridge_cg_plugin.vision.kernels.bicubic import takes
from tests.scripts import interpreted

SCRIPT = """
import sys

import torch

from bridge_cg_plugin.vision.kernels.bicubic import bicubic_samples
from tests.interpreted import prepare

prepare()
found = []
for table, points, gradient in torch.load(sys.argv[1]):
    out = bicubic_samples(table.requires_grad_(), points)
    found.append((out.detach(), *torch.autograd.grad(out, table, gradient)))
torch.save(found, sys.argv[2])
"""
# Sides of the table, points, channels.
CASES = [((5, 5), 40, 24), ((4, 9), 7, 300), ((24, 24), 33, 8), ((2, 2), 3, 2)]


def make_case(sides, points, channels):
    torch.manual_seed(points)
    table = torch.randn(1, channels, *sides).contiguous(memory_format=torch.channels_last)
    places = torch.rand(1, points, 1, 2) * 2 - 1
    places[0, 0, 0], places[0, -1, 0] = torch.tensor([-1.0, 1.0]), torch.tensor([1.0, -0.999])
    return table, places, torch.randn(1, channels, points, 1)


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bicubic")
    cases = [make_case(*case) for case in CASES]
    torch.save(cases, folder / "cases.pt")
    interpreted(SCRIPT, folder / "cases.pt", folder / "results.pt")
    return list(zip(cases, torch.load(folder / "results.pt"), strict=True))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_samples_and_gradients_are_pytorchs(computed, number):
    (table, points, gradient), (out, spread) = computed[number]
    table = table.detach().requires_grad_()
    expected = F.grid_sample(table, points, mode="bicubic", padding_mode="border", align_corners=False)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(spread, torch.autograd.grad(expected, table, gradient)[0], rtol=1e-5, atol=1e-5)


def test_only_single_points_of_one_fp32_image_are_taken():
    table, points, _ = make_case(*CASES[0])
    assert takes(table, points)
    assert not takes(table.bfloat16(), points)
    assert not takes(table.expand(2, -1, -1, -1), points.expand(2, -1, -1, -1))
    assert not takes(table, points.view(1, 20, 2, 2))
    assert not takes(table[:, :, :1], points)
