"""Backward of norms over heads by Triton's interpreter; that its bits are Transformer Engine's, GPU tests show."""

import torch
from torch.nn import functional

from tests.scripts import computed

SCRIPT = """
from bridge_cg_plugin.vision.kernels import head_norms

results = []
for case in cases:
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
found = results, matching
"""
# Fewer rows than a block takes at once, one more, and more than all blocks at once.
CASES = [(1, False), (5, True), (70, False)]
EPSILON = 1e-6


def make_case(rows, zero_centered):
    generator = torch.Generator().manual_seed(rows)
    x, gradient = (torch.randn((rows, 128), generator=generator) for _ in range(2))
    weight = torch.rand(128, generator=generator)
    rstd = (x.square().mean(1) + EPSILON).rsqrt()
    return {"x": x, "gradient": gradient, "rstd": rstd, "weight": weight, "zero_centered": zero_centered}


def test_gradients_are_rmsnorms_and_the_number_of_blocks_is_found_from_bits():
    cases = [make_case(*case) for case in CASES]
    results, matching = computed(SCRIPT, cases)
    assert matching == [4, 6, None]
    for case, found in zip(cases, results, strict=True):
        x, weight = (case[name].double().requires_grad_() for name in ("x", "weight"))
        exact = functional.rms_norm(x, weight.shape, weight + 1 if case["zero_centered"] else weight, EPSILON)
        expected = torch.autograd.grad(exact, [x, weight], case["gradient"].double())
        for one in found:
            for ours, theirs in zip(one, expected, strict=True):
                assert (ours.double() - theirs).norm() <= 1e-5 * theirs.norm()
            assert torch.equal(one[0], found[0][0]), "a row's gradient depends on no other row"
