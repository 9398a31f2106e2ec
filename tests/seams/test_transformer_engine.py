"""What recording relies on in Transformer Engine's modules."""

import inspect

import pytest
import torch
from torch import nn

from bridge_cg_plugin.upstream.kernels.transformer_engine import fused_accumulation


class Linear(nn.Module):
    """Has the attributes of a Transformer Engine linear module that matter."""

    def __init__(self, fused: bool = False, main_grad: bool = True, trainable: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2), requires_grad=trainable)
        if main_grad:
            self.weight.main_grad = torch.zeros(2, 2)
        self.fuse_wgrad_accumulation = fused
        self.is_first_microbatch = True

    @property
    def state(self):
        return self.fuse_wgrad_accumulation, self.is_first_microbatch


@pytest.mark.parametrize(
    ("module", "inside"),
    [
        (Linear(), (True, False)),
        (Linear(fused=True), (True, False)),
        (Linear(main_grad=False), (False, True)),
        (Linear(trainable=False), (False, True)),
    ],
    ids=["plain", "already fused", "without main_grad", "frozen"],
)
def test_accumulation_is_fused_while_recording_only(module, inside):
    before = module.state
    with pytest.raises(KeyError), fused_accumulation([nn.Sequential(module)]):
        assert module.state == inside
        raise KeyError
    assert module.state == before


def test_a_module_without_a_first_microbatch_gets_none():
    module = Linear()
    del module.is_first_microbatch
    with fused_accumulation([module]):
        assert module.fuse_wgrad_accumulation
    assert not hasattr(module, "is_first_microbatch")


@pytest.mark.parametrize("name", ["linear", "layernorm_linear"])
def test_the_modules_read_what_is_set(name):
    module = pytest.importorskip(f"transformer_engine.pytorch.module.{name}")
    source = inspect.getsource(module)
    for needed in ("self.fuse_wgrad_accumulation", "weight.main_grad", "grad_added_to_main_grad = True"):
        assert needed in source
