"""Backward of norms over heads by Triton's interpreter; that its bits are Transformer Engine's, GPU tests show."""

import pytest
import torch
from torch.nn import functional

from tests.scripts import interpreted

SCRIPT = """
import sys

import torch

from tests.interpreted import prepare

prepare()
from bridge_cg_plugin.vision.kernels import head_norms

results = []
for case in torch.load(sys.argv[1]):
    given = [case[name] for name in ("gradient", "x", "rstd", "weight")]
    results.append([head_norms.backward(*given, case["zero_centered"], most) for most in (1, 3, 100)])

def upstream(blocks):
    return lambda gradient, x, rstd, weight, margin, zero_centered: head_norms.backward(
        gradient, x, rstd, weight, zero_centered, blocks
    )

def other(*arguments):
    of_x, of_weight = upstream(1)(*arguments)
    return of_x, of_weight + 1

cpu = torch.device("cpu")
head_norms.BLOCKS = range(1, 4)
matching = [head_norms.matching_blocks(cpu, 2, original) for original in (upstream(4), upstream(6), other)]
torch.save((results, matching), sys.argv[2])
"""
# Fewer rows than a block takes at once, one more, and more than all blocks at once.
CASES = [(rows, zero_centered) for rows in (1, 5, 70) for zero_centered in (False, True)]
EPSILON = 1e-6


def make_case(rows, zero_centered):
    generator = torch.Generator().manual_seed(rows)
    x, gradient = (torch.randn((rows, 128), generator=generator) for _ in range(2))
    weight = torch.rand(128, generator=generator)
    rstd = (x.square().mean(1) + EPSILON).rsqrt()
    return {"x": x, "gradient": gradient, "rstd": rstd, "weight": weight, "zero_centered": zero_centered}


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("head_norms")
    cases = [make_case(*case) for case in CASES]
    torch.save(cases, folder / "in")
    interpreted(SCRIPT, folder / "in", folder / "out")
    results, matching = torch.load(folder / "out")
    return list(zip(cases, results, strict=True)), matching


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_gradients_are_rmsnorms(computed, index):
    case, results = computed[0][index]
    x, weight = (case[name].double().requires_grad_() for name in ("x", "weight"))
    exact = functional.rms_norm(x, weight.shape, weight + 1 if case["zero_centered"] else weight, EPSILON)
    expected = torch.autograd.grad(exact, [x, weight], case["gradient"].double())
    for found in results:
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours.double() - theirs).norm() <= 1e-5 * theirs.norm()
        assert torch.equal(found[0], results[0][0]), "a row's gradient depends on no other row"


def test_the_number_of_blocks_is_found_from_bits(computed):
    assert computed[1] == [4, 6, None]
