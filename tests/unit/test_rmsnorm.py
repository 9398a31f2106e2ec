"""RMSNorm's backward by Triton's interpreter: of whole rows, with the classes it stands in for, and over heads."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.glm4v.modeling_glm4v import Glm4vRMSNorm
from transformers.models.pixtral.modeling_pixtral import PixtralRMSNorm
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniRMSNorm
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm

from bridge_cg_plugin.upstream.encoders.packed_towers import is_rms_norm
from tests.scripts import computed

SCRIPT = """
from bridge_cg_plugin.upstream.encoders import packed_towers
from bridge_cg_plugin.vision.kernels import norms
from transformers.models.pixtral.modeling_pixtral import PixtralRMSNorm

packed_towers.has_kernels = lambda tensor: True
launches = []
backward = norms.rmsnorm_backward
norms.rmsnorm_backward = lambda *args: launches.append(1) or backward(*args)
found = []
for case in cases:
    norm = PixtralRMSNorm(case["x"].shape[-1], eps=case["epsilon"]).to(case["x"].dtype)
    norm.weight.data.copy_(case["weight"])
    x = case["x"].requires_grad_()
    with packed_towers.reordering_kernels([norm]):
        out = norm(x)
    before = norm.forward.__func__ is PixtralRMSNorm.forward
    found.append([out.detach(), *torch.autograd.grad(out, [x, norm.weight], case["gradient"]), len(launches), before])
"""
# Rows: one, fewer and more than a program's tile, more than all programs' tiles; columns around a power of two.
SHAPES = [(1, 1, 40), (7, 1, 300), (150, 1, 256), (1, 700, 72)]
CASES = list(zip(SHAPES, 2 * (torch.float32, torch.float16), strict=True))  # the interpreter takes seconds for a case


def make_case(shape, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    x, gradient = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    return {"x": x, "gradient": gradient, "weight": weight, "epsilon": 0.1}


@pytest.fixture(scope="module")
def results():
    cases = [make_case(*case) for case in CASES]
    return list(zip(cases, computed(SCRIPT, cases), strict=True))


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_gradients_are_rmsnorms_and_the_forward_is_upstreams(results, index):
    case, (out, of_x, of_weight, launches, comes_back) = results[index]
    norm = PixtralRMSNorm(case["x"].shape[-1], eps=case["epsilon"]).to(case["x"].dtype)
    norm.weight.data.copy_(case["weight"])
    assert torch.equal(out, norm(case["x"]))
    assert launches == index + 1 and comes_back
    x, weight = (case[name].double().requires_grad_() for name in ("x", "weight"))
    exact = functional.rms_norm(x, weight.shape, weight, case["epsilon"])
    for found, expected in zip(
        (of_x, of_weight), torch.autograd.grad(exact, [x, weight], case["gradient"].double()), strict=True
    ):
        assert found.shape == expected.shape and found.dtype == case["x"].dtype
        tolerance = 1e-5 if found.dtype is torch.float32 else 1e-3
        assert (found.double() - expected).norm() <= tolerance * expected.norm()


class ZeroCenteredRMSNorm(PixtralRMSNorm):
    """Multiplies by weight + 1."""

    def forward(self, x):
        return super().forward(x) + x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class BiasedRMSNorm(PixtralRMSNorm):
    """Has another parameter."""

    def __init__(self, size, eps=1e-6):
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size))


class GroupedRMSNorm(nn.Module):
    """Is made otherwise."""

    def __init__(self, size, groups):
        super().__init__()


THEIRS = (Glm4vRMSNorm, PixtralRMSNorm, Qwen2_5OmniRMSNorm, Qwen2_5_VLRMSNorm)
OTHERS = (ZeroCenteredRMSNorm, BiasedRMSNorm, GroupedRMSNorm, nn.RMSNorm, nn.LayerNorm)


@pytest.mark.parametrize("kind", [*THEIRS, *OTHERS])
def test_hugging_faces_norms_are_known_and_others_are_not(kind):
    assert is_rms_norm(kind) == (kind in THEIRS)


OVER_HEADS = """
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
HEAD_CASES = [(1, False), (5, True), (70, False)]
EPSILON = 1e-6


def make_head_case(rows, zero_centered):
    generator = torch.Generator().manual_seed(rows)
    x, gradient = (torch.randn((rows, 128), generator=generator) for _ in range(2))
    weight = torch.rand(128, generator=generator)
    rstd = (x.square().mean(1) + EPSILON).rsqrt()
    return {"x": x, "gradient": gradient, "rstd": rstd, "weight": weight, "zero_centered": zero_centered}


def test_gradients_are_rmsnorms_and_the_number_of_blocks_is_found_from_bits():
    cases = [make_head_case(*case) for case in HEAD_CASES]
    results, matching = computed(OVER_HEADS, cases)
    assert matching == [4, 6, None]
    for case, found in zip(cases, results, strict=True):
        x, weight = (case[name].double().requires_grad_() for name in ("x", "weight"))
        exact = functional.rms_norm(x, weight.shape, weight + 1 if case["zero_centered"] else weight, EPSILON)
        expected = torch.autograd.grad(exact, [x, weight], case["gradient"].double())
        for one in found:
            for ours, theirs in zip(one, expected, strict=True):
                assert (ours.double() - theirs).norm() <= 1e-5 * theirs.norm()
            assert torch.equal(one[0], found[0][0]), "a row's gradient depends on no other row"
