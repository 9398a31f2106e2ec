"""Which of Transformer Engine's matrix products run on the side stream of a recording."""

import importlib

import pytest
import torch
from torch import nn

from bridge_cg_plugin.graphs.recordings.streams import SideStream
from bridge_cg_plugin.graphs.replays.gradients import SMALL
from bridge_cg_plugin.upstream.encoders.qwen3_vl import QWEN3_VL
from bridge_cg_plugin.upstream.encoders.radio import PACKED_RADIO, RADIO
from bridge_cg_plugin.upstream.kernels import transformer_engine as side_products
from bridge_cg_plugin.upstream.kernels.transformer_engine import side_weight_gradients
from bridge_cg_plugin.upstream.seams.registry.engine import TE_GEMM, TE_LAYERNORM_LINEAR, TE_LINEAR

pytest.importorskip("transformer_engine.pytorch")
GEMM, *OWNERS = (importlib.import_module(name) for name in (TE_GEMM, TE_LINEAR, TE_LAYERNORM_LINEAR))


class Recorder(SideStream):
    """A side stream that notes what ran on it, and what it was told that work reads."""

    def __init__(self):
        super().__init__(None)
        self.ran = []

    def run(self, work, *reads):
        made = super().run(work, *reads)
        self.ran.append((made, reads))
        return made


class Linear(nn.Module):
    """A layer with the parameters of a Transformer Engine linear module."""

    def __init__(self, width: int = 2, main_grad: bool = True) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width, 2)), nn.Parameter(torch.zeros(width))
        if main_grad:
            self.weight.main_grad = torch.zeros(width, 2)


def product(calls):
    """Return a stand-in for `general_gemm` that multiplies as a weight gradient does and notes its workspace."""

    def general_gemm(a, b, *args, **kwargs):
        calls.append(GEMM.get_cublas_workspace(0, False, False))
        if kwargs.get("accumulate"):
            kwargs["out"] += b.T @ a
        # Transformer Engine makes a bias's gradient in the dtype of `out`.
        return kwargs.get("out"), b.sum(0) if kwargs.get("bias") is not None else None, None, None

    return general_gemm


@pytest.fixture
def gemm(monkeypatch):
    """Stand-ins for Transformer Engine's product and workspaces, which need a GPU; yields the workspaces used."""
    calls = []
    for owner in OWNERS:
        monkeypatch.setattr(owner, "general_gemm", product(calls))
    monkeypatch.setattr(GEMM, "get_cublas_workspace", lambda device, ub, grouped: "main")
    monkeypatch.setattr(GEMM, "get_cublas_workspace_size_bytes", lambda: 64)
    monkeypatch.setattr(side_products, "_workspace", lambda device, nbytes: ("side", nbytes))
    return calls


def weight_gradient(module, owner=OWNERS[0], **changes):
    """Call the product of a weight's gradient as Transformer Engine's backward does; returns x and what was made."""
    x, dy = torch.ones(3, 2), torch.ones(3, module.weight.shape[0])
    kwargs = {
        "layout": "NT", "grad": True, "accumulate": True, "out": module.weight.main_grad, "bias": None,
        "quantization_params": None, "ub": None, "extra_output": None,
    }  # fmt: skip
    return x, owner.general_gemm(x, dy, **{**kwargs, **changes})


def used(module, times: int = 1) -> None:
    for _ in range(times):
        OWNERS[0].general_gemm(module.weight, torch.ones(3, 2), bias=module.bias)


@pytest.mark.parametrize("owner", OWNERS, ids=["Linear", "LayerNormLinear"])
def test_a_weights_gradient_runs_beside_with_a_workspace_of_its_own(gemm, owner):
    side, module = Recorder(), Linear()
    with side.active(), side_weight_gradients([module]):
        x, made = weight_gradient(module, owner)
        ((result, reads),) = side.ran
        assert result is made
        assert [t.data_ptr() for t in reads][0] == x.data_ptr() and reads[0] is not x
        x.data = torch.empty(0)  # what Transformer Engine does with tensors of its own
        assert reads[0].shape == (3, 2)
    assert gemm == [("side", 64)]
    assert torch.equal(module.weight.main_grad, torch.full((2, 2), 3.0))


def without(**changes):
    return lambda side, module: weight_gradient(module, **changes)


def bias_used_twice(side, module):
    used(module, times=2)
    weight_gradient(module, bias=module.bias)


def bias_never_used(side, module):
    weight_gradient(module, bias=module.bias)


def to_a_tensor_of_its_own(side, module):
    weight_gradient(module, out=torch.zeros(2, 2))


@pytest.mark.parametrize(
    "call",
    [
        without(accumulate=False),
        without(grad=False),
        without(out=None, accumulate=False),
        without(quantization_params=object()),
        without(ub=object()),
        without(extra_output=torch.zeros(1)),
        to_a_tensor_of_its_own,
        bias_used_twice,
        bias_never_used,
    ],
)
def test_every_other_product_stays_where_it_is(gemm, call):
    side, module = Recorder(), Linear()
    with side.active(), side_weight_gradients([module]):
        call(side, module)
    assert not side.ran
    assert set(gemm) == {"main"}


def test_a_biass_gradient_is_cast_beside_and_not_by_autograd_on_the_main_stream(gemm):
    side, module = Recorder(), Linear().bfloat16()
    side.forget()
    with side.active(), side_weight_gradients([module]):
        used(module)
    with side.active(), side_weight_gradients([module]):  # the backward, on the same side stream
        _, (_, gradient, *_) = weight_gradient(module, bias=module.bias)
    ((made, _),) = side.ran
    assert gradient is made[1] and gradient.dtype == torch.bfloat16
    assert torch.equal(gradient, torch.full((2,), 3.0, dtype=torch.bfloat16))


def test_a_large_bias_is_added_at_once_and_so_stays_on_the_main_stream(gemm):
    side, module = Recorder(), Linear(width=SMALL + 1)
    side.forget()
    with side.active(), side_weight_gradients([module]):
        used(module)
        weight_gradient(module, bias=module.bias)
    assert not side.ran


@pytest.mark.parametrize("family", [QWEN3_VL, RADIO, PACKED_RADIO], ids=lambda family: family.name)
def test_products_beside_write_to_no_workspace_of_the_main_stream(gemm, family):
    """Products that run at the same time in one workspace write to each other's intermediate results."""
    side, module = Recorder(), Linear()
    with side.active(), family.kernels([module]), family.fused_accumulation([module]):
        weight_gradient(module)
        OWNERS[0].general_gemm(module.weight, torch.ones(3, 2))
    assert len(side.ran) == 1 and gemm == [("side", 64), "main"]
