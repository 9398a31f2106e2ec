"""A swap that does not fit a release is left out, and no other; upstream's own code runs in graphs in its place."""

import importlib
from collections import Counter
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from bridge_cg_plugin.graphs.recordings.streams import SideStream
from bridge_cg_plugin.upstream.encoders import direct_attention
from bridge_cg_plugin.upstream.kernels import layers, recompute, rotary, transformer_engine
from bridge_cg_plugin.upstream.seams.contract import OUTLINES, SWAPS
from bridge_cg_plugin.upstream.seams.registry import INSTEAD, SEAMS, seam
from bridge_cg_plugin.upstream.seams.registry.engine import EXTENSIONS, TE_RMSNORM
from tests.unit.towers import new_tower

from .test_transformer_engine import Linear

CONTEXTS = (
    *(rotary.fused_rotary, layers.fused_layer_kernels, layers.fused_layernorm_backward, layers.fused_head_norms),
    *(transformer_engine.fused_accumulation, transformer_engine.known_activations, direct_attention.direct_attention),
)
PRODUCTS = {"linear.general_gemm", "layernorm_linear.general_gemm"}
PROJECTED = {"Qwen3VLSelfAttention.forward", "Qwen3VLSelfAttention.get_query_key_value_tensors"}
# Seams, or what runs in their place -> what of upstream keeps its own value without them.
LEFT_OUT = {
    "upstream's rotation": {"attention.apply_rotary_pos_emb_absolute", *PROJECTED},
    "rotation behind the projection": PROJECTED,
    "upstream's sums of bias and residual": {"TransformerLayer.self_attn_bda", "TransformerLayer.mlp_bda"},
    "upstream's bias and activation": {"MLP.forward"},
    "Transformer Engine's attention": {"TEDotProductAttention.forward"},
    "weight gradients on the main stream": {"gemm.get_cublas_workspace", *PRODUCTS},
    "weight gradients added after their product": {"Linear.fuse_wgrad_accumulation", "Linear.is_first_microbatch"},
    "placeholders as large as weights": {"linear.get_dummy_wgrad", "layernorm_linear.get_dummy_wgrad"},
    "layernorm_backward": {"transformer_engine_torch.layernorm_bwd"},
    "layernorm_operation": {"layer_norm.layernorm_bwd"},
    "Transformer Engine's RMSNorm in backward": {"rmsnorm.rmsnorm_bwd"},
    "offloading of what could be recomputed": {"layernorm_linear.apply_normalization", *PRODUCTS},
}
# Without these, no other kernel is asked for; one segment attends unpacked as before.
SETTINGS = ("attention_settings", "attention_scale")
LEFT_OUT |= dict.fromkeys(SETTINGS, set())
CHOICE = ("attention_choice", "attention_backend", "flash_attention_installed")


def owner_name(owner):
    if isinstance(owner, nn.Module):
        return type(owner).__name__.removesuffix("Module")
    return owner.__name__.rpartition(".")[2]


@pytest.fixture(scope="module")
def modules():
    """Return modules that every swap concerns; the constructor of attention needs a GPU."""
    attention = nn.Module.__new__(importlib.import_module(EXTENSIONS).TEDotProductAttention)
    nn.Module.__init__(attention)
    return [new_tower(), attention, Linear(), importlib.import_module(TE_RMSNORM).RMSNorm(128, device="cpu")]


@pytest.fixture
def swapped(modules, monkeypatch):
    """Return a function that enters every context of recorded work and returns what they swap, how many times."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def enter():
        found = Counter()
        with ExitStack() as stack, SideStream(None).active():
            for room in (rotary, layers, transformer_engine, recompute, direct_attention):
                original = room.overridden

                def spied(owner, name, value, original=original):
                    found[f"{owner_name(owner)}.{name}"] += 1
                    return original(owner, name, value)

                stack.enter_context(pytest.MonkeyPatch.context()).setattr(room, "overridden", spied)
            for context in CONTEXTS:
                stack.enter_context(context(modules))
        return found

    return enter


@pytest.mark.parametrize("name", [name for names in INSTEAD.values() for name in names])
def test_a_swap_that_does_not_fit_is_left_out_and_no_other(active, swapped, break_seam, name):
    complete = swapped()
    break_seam(seam(name))
    found = swapped()
    assert not found - complete
    assert set(complete - found) == LEFT_OUT.get(name) or set(complete - found) == LEFT_OUT[seam(name).instead]


@pytest.mark.parametrize("name", CHOICE)
def test_attention_that_is_chosen_otherwise_is_not_called_directly(active, break_seam, monkeypatch, name):
    monkeypatch.setattr(direct_attention, "_process_refusal", lambda: None)
    break_seam(seam(name))
    assert "chooses attention otherwise" in direct_attention.direct_attention_refusal()


@pytest.mark.parametrize("name", SETTINGS)
def test_attention_that_is_set_up_otherwise_is_not_replaced(active, break_seam, monkeypatch, name):
    monkeypatch.setattr(direct_attention, "_process_refusal", lambda: None)
    break_seam(seam(name))
    for refusal in (direct_attention.direct_attention_refusal(), direct_attention.flash_attention_refusal()):
        assert "sets attention up otherwise" in refusal


def test_every_swap_of_the_contract_may_be_left_out():
    """Some may not: a router's masks and counts, since padding would count, what weights in fp8 go by, and lengths.

    An older cuDNN would read the lengths from the host in every replay.
    """
    kept = {each.name for each in SEAMS if each.target in SWAPS.get(each.module, ()) and not each.instead}
    assert kept == {"packed_masked_router", "packed_expert_bias", "packed_fp8_layernorm_linear", "attention_backward"}
    assert not {each.name for each in SEAMS if each.target in OUTLINES.get(each.module, ()) and each.instead}
