"""By which kernels eager attends: what Transformer Engine and megatron-core make of variables and options."""

import importlib
import inspect
import os
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from bridge_cg_plugin.upstream.encoders import direct_attention
from bridge_cg_plugin.upstream.encoders.direct_attention import direct_attention_refusal
from bridge_cg_plugin.upstream.kernels import layers as layer_kernels
from bridge_cg_plugin.upstream.kernels.transformer_engine import fused_attention_refusal
from bridge_cg_plugin.upstream.seams.registry.engine import TE_ATTENTION_UTILS

VARIABLES = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V2", "NVTE_UNFUSED_ATTN")
HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch):
    for name in (*VARIABLES, "NVTE_FUSED_ATTN_USE_FAv2_BWD"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that lets this process have a GPU of some kind, with or without the package flash-attn."""
    engine = importlib.import_module(TE_ATTENTION_UTILS)

    def have(capability, installed=False):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *unused: capability)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)  # the first one's process is given advice
        monkeypatch.setattr(engine, "get_device_compute_capability", lambda: capability)
        monkeypatch.setattr(engine, "get_cudnn_version", lambda *unused: (9, 19, 0))
        kernels = engine.FusedAttnBackend["F16_arbitrary_seqlen"]
        if hasattr(engine, "_get_fused_attn_backend"):
            monkeypatch.setattr(engine, "_get_fused_attn_backend", lambda **unused: (kernels, ""))
        else:  # Transformer Engine before 2.20
            monkeypatch.setattr(engine.tex, "get_fused_attn_backend", lambda *unused: kernels)
        monkeypatch.setattr(engine.FlashAttentionUtils, "is_installed", installed)
        for flag in ("v2_plus", "v2_1_plus", "v2_3_plus", "v2_4_plus", "v2_4_1_plus"):
            monkeypatch.setattr(engine.FlashAttentionUtils, flag, installed)
        return engine

    return have


def attends_by_fused_kernels(engine):
    """Return what Transformer Engine chooses for packed segments; None where it has nothing to choose."""
    call = {"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding", "window_size": (-1, -1), "is_training": True}
    if "num_tokens_q" in engine.AttentionParams.__dataclass_fields__:  # from Transformer Engine 2.20 on
        call |= {"num_tokens_q": 512, "num_tokens_kv": 512}
    params = engine.AttentionParams(**call, head_dim_qk=72, head_dim_v=72, batch_size=4, core_attention_bias_shape=None)
    flash, _, fused, _, unfused, _ = engine.get_attention_backend(params)
    return bool(fused) if flash or fused or unfused else None


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), HOPPER, (10, 0)], ids=str)
@pytest.mark.parametrize("installed", [False, True], ids=["", "flash-attn"])
def test_eager_attends_by_what_transformer_engine_chooses(gpu, capability, installed):
    engine = gpu(capability, installed)
    # Releases before 2.18 know no versions of flash-attn.
    read = [name for name in VARIABLES if f'"{name}"' in inspect.getsource(engine)]
    for values in product((None, "0", "1"), repeat=len(read)):
        given = {name: value for name, value in zip(read, values, strict=True) if value is not None}
        with mock.patch.dict(os.environ, given):
            assert (fused_attention_refusal() is None) == bool(attends_by_fused_kernels(engine)), given


@pytest.mark.parametrize(
    ("backend", "fused"), [("auto", True), ("fused", True), ("flash", False), ("unfused", False), ("local", False)]
)
def test_megatron_cores_attention_backend_is_in_the_variables(gpu, backend, fused):
    language = importlib.import_module("megatron.core.models.common.language_module.language_module")
    enums = importlib.import_module("megatron.core.transformer.enums")
    gpu(HOPPER)
    config = SimpleNamespace(attention_backend=enums.AttnBackend[backend], flash_attention_version=None)
    with mock.patch.dict(os.environ):
        language.LanguageModule._set_attention_backend(SimpleNamespace(config=config))
        assert (fused_attention_refusal() is None) == fused


@pytest.mark.parametrize(("capability", "refused"), [(HOPPER, True), ((8, 0), False), ((10, 0), False)], ids=str)
def test_flash_attentions_backward_behind_cudnns_forward(gpu, monkeypatch, capability, refused):
    gpu(capability)
    monkeypatch.setenv("NVTE_FUSED_ATTN_USE_FAv2_BWD", "1")
    assert (fused_attention_refusal() is not None) == refused


@pytest.fixture
def able(gpu, monkeypatch):
    """A Hopper GPU with everything that other attention needs."""
    gpu(HOPPER)
    monkeypatch.setattr(direct_attention, "kernels_available", lambda: True)
    monkeypatch.setattr("bridge_cg_plugin.vision.kernels.cudnn_attention.unavailable", lambda: None)
    monkeypatch.setattr("bridge_cg_plugin.upstream.encoders.flash_attention.unavailable", lambda: None)


@pytest.mark.parametrize("fused", [None, "0", "1"])
def test_cudnn_is_called_directly_and_for_one_segment_unpacked_only_where_eager_attends_by_it(able, monkeypatch, fused):
    if fused is not None:
        monkeypatch.setenv("NVTE_FUSED_ATTN", fused)
    said = "NVTE_FUSED_ATTN=0 or attention_backend keeps eager from cuDNN's attention" if fused == "0" else None
    assert direct_attention_refusal() == said
    attention = torch.nn.Identity()
    monkeypatch.setattr(layer_kernels, "is_te_attention", lambda module: module is attention)
    with layer_kernels.fused_layer_kernels([attention]):
        assert ("forward" in vars(attention)) == (fused != "0")
