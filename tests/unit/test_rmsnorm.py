"""RMSNorm's backward by Triton's interpreter, and which classes it stands in for."""

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
    with packed_towers.rmsnorm_backward([norm]):
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


@pytest.mark.parametrize("kind", [Glm4vRMSNorm, PixtralRMSNorm, Qwen2_5OmniRMSNorm, Qwen2_5_VLRMSNorm])
def test_hugging_faces_norms_are_known(kind):
    assert is_rms_norm(kind)


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


@pytest.mark.parametrize("kind", [ZeroCenteredRMSNorm, BiasedRMSNorm, GroupedRMSNorm, nn.RMSNorm, nn.LayerNorm])
def test_others_stay_as_they_are(kind):
    assert not is_rms_norm(kind)
