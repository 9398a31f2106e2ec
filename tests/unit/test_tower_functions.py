"""What takes the place of functions of Hugging Face's encoders."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.glm4v import modeling_glm4v
from transformers.models.glm4v.modeling_glm4v import Glm4vRMSNorm
from transformers.models.pixtral.modeling_pixtral import PixtralRMSNorm
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniRMSNorm
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm

from bridge_cg_plugin.upstream.encoders import glm45v
from bridge_cg_plugin.upstream.encoders.packed_towers import is_rms_norm


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


BICUBIC = {"mode": "bicubic", "padding_mode": "border", "align_corners": False}


@pytest.mark.parametrize("sides, points, channels", [((5, 5), 40, 24), ((4, 9), 7, 30), ((2, 2), 3, 2), ((1, 3), 1, 1)])
def test_bicubic_samples_and_gradients_are_pytorchs(sides, points, channels):
    torch.manual_seed(points)
    table = torch.randn(1, channels, *sides, requires_grad=True)
    places = torch.rand(2, points, 1, 1).permute(3, 1, 2, 0) * 2.4 - 1.2  # outside, too
    places[0, 0, 0], places[0, -1, 0] = torch.tensor([-1.0, 1.0]), torch.tensor([1.0, -1.0])
    before = F.grid_sample
    with glm45v.recording_kernels([]):
        found = modeling_glm4v.F.grid_sample(table, places, **BICUBIC)
        assert F.grid_sample is not before and type(found.grad_fn) is not type(before(table, places).grad_fn)
    assert F.grid_sample is before
    expected = before(table, places, **BICUBIC)
    gradient = torch.randn_like(expected)
    for ours, theirs in [
        (found, expected),
        [torch.autograd.grad(out, table, gradient)[0] for out in (found, expected)],
    ]:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", [{"mode": "bilinear"}, {"align_corners": True}, {"padding_mode": "zeros"}])
def test_other_samples_are_pytorchs(change):
    table, places = torch.randn(1, 3, 5, 5), torch.rand(1, 7, 1, 2)
    with glm45v.recording_kernels([]):
        found = F.grid_sample(table, places, **BICUBIC | change)
    assert torch.equal(found, F.grid_sample(table, places, **BICUBIC | change))
