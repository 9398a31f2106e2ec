"""What is swapped in megatron-core's and Transformer Engine's layers while a region is recorded."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch

from bridge_cg_plugin.upstream.kernels import layers as layer_kernels
from bridge_cg_plugin.upstream.kernels.layers import fused_layer_kernels
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.seam import NEWEST
from tests.scripts import interpreted
from tests.unit.towers import new_tower


def test_layers_are_swapped_while_recording_only():
    tower = new_tower()
    before = {name: dict(vars(module)) for name, module in tower.named_modules()}
    layers = len(tower.decoder.layers)
    with fused_layer_kernels([tower]):
        swapped = {
            name: {key for key, value in vars(module).items() if before[name].get(key) is not value}
            for name, module in tower.named_modules()
        }
    swapped = {name: keys for name, keys in swapped.items() if keys}
    assert sum(keys == {"forward"} for keys in swapped.values()) == layers
    assert sum(keys == {"self_attn_bda", "mlp_bda"} for keys in swapped.values()) == layers
    assert not any("merger" in name for name in swapped)
    after = {name: dict(vars(module)) for name, module in tower.named_modules()}
    assert all(after[name].keys() == before[name].keys() for name in before)
    assert all(after[name][key] is value for name in before for key, value in before[name].items())


def bias_dropout_add(calls):
    def get(training, fused):
        return lambda x_with_bias, residual, prob: calls.append((training, fused, prob))

    return get


X, BIAS = torch.zeros(2, 1, 4), torch.zeros(4)


@pytest.mark.parametrize(
    ("fused", "prob", "bias", "residual"),
    [
        (True, 0.0, BIAS, X),
        (False, 0.1, BIAS, X),
        (False, 0.0, None, X),
        (False, 0.0, BIAS, X.double()),
        (False, 0.0, BIAS, torch.zeros(4, 1, 2).permute(2, 1, 0)),
    ],
    ids=["compiled", "dropout", "no bias", "fp32 residual", "strided residual"],
)
def test_what_the_residual_kernel_does_not_do_stays_upstreams(fused, prob, bias, residual):
    pytest.importorskip("triton")
    calls = []
    layer_kernels._bias_residual(bias_dropout_add(calls))(True, fused)((X, bias), residual, prob)
    assert calls == [(True, fused, prob)]


class Attention:
    def forward(self, *args, **kwargs):
        self.seen = (args, kwargs)
        return args[0]


class PackedAttention(Attention):
    def forward(self, *args, **kwargs):
        return "packed"


def packed(segments):
    offsets = torch.arange(segments + 1, dtype=torch.int32)
    return SimpleNamespace(cu_seqlens_q=offsets, cu_seqlens_kv=offsets)


def test_one_segment_attends_unpacked():
    attention, query = PackedAttention(), torch.zeros(768, 2, 4)
    out = layer_kernels._attention_forward(attention, query, query, query, None, packed_seq_params=packed(1))
    args, kwargs = attention.seen
    assert [tuple(a.shape) for a in args[:3]] == [(1, 768, 2, 4)] * 3
    assert kwargs["qkv_format"] == "bshd"
    assert kwargs["attn_mask_type"] == "padding"
    assert torch.equal(kwargs["cu_seqlens_q"], torch.tensor([0, 1], dtype=torch.int32))
    assert out.shape == (768, 8)


@pytest.mark.parametrize(
    ("params", "tokens"),
    [(None, 768), (packed(2), 768), (packed(1), 764)],
    ids=["not packed", "two segments", "few tokens"],
)
def test_other_attention_stays_upstreams(params, tokens):
    query = torch.zeros(tokens, 2, 4)
    found = layer_kernels._attention_forward(PackedAttention(), query, query, query, None, packed_seq_params=params)
    assert found == "packed"


STREAM_SCRIPT = """
import importlib
import json

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from torch import nn
from torch.nn import functional as F

from bridge_cg_plugin.upstream.kernels import layers as layer_kernels
from tests.interpreted import prepare

prepare()
layer_kernels.as_shipped = lambda module, name: True  # Transformer Engine's own runs on a GPU only
from bridge_cg_plugin.vision.kernels import bias, reduction, residual

LayerNormLinear = importlib.import_module(layer_kernels.TE_LAYERNORM_LINEAR).LayerNormLinear
extension = importlib.import_module(layer_kernels.TE_EXTENSION)
WIDTH, EPSILON = 40, 1e-6


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain, shift, weight):
        flat = x.reshape(-1, WIDTH)
        mean = flat.mean(1)
        rstd = (flat.var(1, unbiased=False) + EPSILON).rsqrt()
        normed = F.layer_norm(x, (WIDTH,), gain, shift, EPSILON)
        ctx.save_for_backward(x, mean, rstd, gain, weight, normed)
        return normed @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, mean, rstd, gain, weight, normed = ctx.saved_tensors
        inner = (gradient @ weight).reshape(-1, WIDTH)
        dx, dgain, dshift = extension.layernorm_bwd(inner, x.reshape(-1, WIDTH), mean, rstd, gain, 0, False)
        dweight = gradient.reshape(-1, WIDTH).t() @ normed.reshape(-1, WIDTH)
        return dx.reshape(x.shape), dgain, dshift, dweight


class NormLinear(LayerNormLinear):
    def __init__(self):
        nn.Module.__init__(self)
        self.normalization = "LayerNorm"
        self.layer_norm_weight = nn.Parameter(torch.randn(WIDTH))
        self.layer_norm_bias = nn.Parameter(torch.randn(WIDTH))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x, swapped=True):
        parameters = self.layer_norm_weight, self.layer_norm_bias, self.weight
        if swapped:
            return Function.apply(x, *parameters)
        return F.layer_norm(x, (WIDTH,), *parameters[:2], EPSILON) @ self.weight.t()


class Block(nn.Module):
    def __init__(self, linear, bias):
        super().__init__()
        self.linear, self.bias = linear, bias
        self.mlp_bda = get_bias_dropout_add

    def forward(self, x, swapped=True):
        return self.mlp_bda(True, False)((torch.tanh(self.linear(x, swapped)), self.bias), x, 0.0)


class Tower(nn.Module):
    def __init__(self, case):
        super().__init__()
        biases = [nn.Parameter(torch.randn(WIDTH)) for _ in range(10)]
        if case == "shared bias":
            biases[1] = biases[2]
        linears = [NormLinear() for _ in range(10)]
        if case == "shared norm":
            linears[3] = linears[4]
        self.blocks = nn.ModuleList(Block(linear, bias) for linear, bias in zip(linears, biases))
        self.tap = NormLinear()
        self.added = biases[3] if case == "bias elsewhere" else None
        if case == "frozen":
            for block in self.blocks[:4]:
                block.requires_grad_(False)
            self.blocks[6].requires_grad_(False)

    def forward(self, x, swapped=True):
        for index, block in enumerate(self.blocks):
            x = block(x, swapped)
            if index == 5:
                tapped = self.tap(x, swapped)
        return [x if self.added is None else x + self.added, tapped]


def gradients(tower, x, swapped):
    outputs = tower(x, swapped)
    wanted = [p for p in [x, *tower.parameters()] if p.requires_grad]
    loss = sum((o * torch.linspace(0.5, 1.5, o.numel()).view(o.shape)).sum() for o in outputs)
    return [o.detach() for o in outputs], torch.autograd.grad(loss, wanted)


summed = []
column_sum = bias.column_sum
bias.column_sum = lambda *args: summed.append(1) or column_sum(*args)
launched = []
add_partials = reduction.add_partials
reduction.add_partials = lambda *args: launched.append(1) or add_partials(*args)
torch.manual_seed(0)
counts = {}
for case in ("plain", "shared bias", "shared norm", "bias elsewhere", "frozen", "input without gradient"):
    tower, x = Tower(case), torch.randn(18, 1, WIDTH, requires_grad=case != "input without gradient")
    expected, wanted = gradients(tower, x, swapped=False)
    summed.clear()
    launched.clear()
    with layer_kernels.fused_layer_kernels([tower]), layer_kernels.fused_layernorm_backward([tower]):
        outputs, found = gradients(tower, x, swapped=True)
    for a, b in zip([*outputs, *found], [*expected, *wanted], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5 * float(b.abs().max()))
    counts[case] = len(summed), len(launched)
print(json.dumps(counts))
"""


@pytest.mark.skipif(bridge_release() != NEWEST.bridge, reason="kernels are the same beside every release")
def test_the_residual_streams_gradient_is_added_in_layernorms_backward():
    written = interpreted(STREAM_SCRIPT)
    counts = json.loads(written.splitlines()[-1])
    # Summed by themselves: the last addition's gradient, and the one that a second reader adds to. Launches that add
    # partial sums: those two, the norms of ten blocks eight at a time, the other reader's norm.
    assert counts["plain"] == [2, 4]
    assert counts["frozen"] == [2, 4]
    # What is used twice is added up at once.
    assert counts["shared bias"] == [4, 6]
    assert counts["shared norm"] == [2, 5]
    # So is what another module has, too: its use there is not seen.
    assert counts["bias elsewhere"] == [3, 5]


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"gated_linear_unit": True}, False),
        ({"bias_activation_fusion": True}, False),
        ({"use_te_activation_func": True}, False),
    ],
)
def test_only_a_plain_mlp_is_swapped(change, fits):
    mlp = importlib.import_module(layer_kernels.MLP).MLP
    made = mlp.__new__(mlp)
    torch.nn.Module.__init__(made)
    config = {"gated_linear_unit": False, "bias_activation_fusion": False, "use_te_activation_func": False, **change}
    made.config = SimpleNamespace(**config)
    assert layer_kernels.adds_bias_before_activation(made) == fits
