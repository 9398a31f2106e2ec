"""cuDNN's attention in place of Transformer Engine's call while a region is recorded."""

import dataclasses
import importlib
from unittest import mock

import pytest
import torch

from bridge_cg_plugin.graphs.instance import InstanceMethod
from bridge_cg_plugin.language.packed.batch import OFFSETS
from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.encoders import direct_attention
from bridge_cg_plugin.upstream.encoders.qwen3_vl import QWEN3_VL
from bridge_cg_plugin.upstream.kernels import layers as layer_kernels
from bridge_cg_plugin.upstream.seams.registry.engine import TE_ATTENTION_BACKENDS
from bridge_cg_plugin.upstream.wrappers import pack_params
from bridge_cg_plugin.vision.encoder import OtherAttention, RecordedKernels
from tests.unit.towers import new_tower

pytest.importorskip("triton")

from bridge_cg_plugin.vision.kernels import cudnn_attention

SET_UP = {
    "attention_dropout": 0.0, "softmax_type": "vanilla", "return_max_logit": False, "window_size": (-1, -1),
}  # fmt: skip
SCALE = 0.25


def te_attention_class():
    return importlib.import_module(layer_kernels.EXTENSIONS).TEDotProductAttention


def bare(kind, **attributes):
    """Return a module of Transformer Engine's whose constructor, which needs a GPU, did not run."""
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def attention():
    """Return Transformer Engine's attention module of a layer."""
    fused = bare(importlib.import_module(TE_ATTENTION_BACKENDS).FusedAttention, softmax_scale=SCALE)
    return bare(te_attention_class(), config=new_tower().config, fused_attention=fused, **SET_UP)


def qkv(tokens=300, dtype=torch.bfloat16):
    return torch.zeros(tokens, 2, 3, 16, dtype=dtype).unbind(2)


def packed(segments=4, largest=128):
    return pack_params(dict.fromkeys(OFFSETS, torch.zeros(segments + 1, dtype=torch.int32)), largest)


def mask(name="no_mask"):
    return importlib.import_module("megatron.core.transformer.enums").AttnMaskType[name]


def attends(attention, parts=None, args=(None,), plans="plans", **kwargs):
    given = {"packed_seq_params": packed(), "attn_mask_type": mask(), "attention_bias": None, **kwargs}
    reached = []
    below = InstanceMethod(attention, "forward", lambda *args, **kwargs: reached.append(args))
    with (
        mock.patch.object(cudnn_attention, "plans_for", lambda query, *bounds: plans if bounds[-1] == SCALE else None),
        mock.patch.object(cudnn_attention, "segment_attention", lambda query, *unused: query.contiguous()),
        direct_attention.direct_attention([attention]),
    ):
        attention.forward(*(parts or qkv()), *args, **given)
    below.restore()
    return not reached


def test_packed_segments_of_one_projection_attend_directly(attention):
    assert attends(attention)
    assert attends(attention, attn_mask_type=mask("padding"))
    assert attends(attention, qkv(768), packed_seq_params=packed(1, 768))


CHANGED = pack_params(dict.fromkeys(OFFSETS, torch.zeros(5, dtype=torch.int32)), 128)
CHANGED.cu_seqlens_kv = CHANGED.cu_seqlens_q.clone()


@pytest.mark.parametrize(
    "call",
    [
        {"attn_mask_type": mask("causal")},
        {"attn_mask_type": None},
        {"attention_bias": torch.zeros(1)},
        {"args": (torch.zeros(1),)},
        {"num_splits": 1},
        {"packed_seq_params": CHANGED},
        {"packed_seq_params": packed(largest=torch.tensor(128))},
        {"parts": qkv(dtype=torch.float32)},
        {"parts": tuple(part.clone() for part in qkv())},
        {"plans": None},
    ],
    ids=[
        "causal", "no mask type", "bias", "mask", "splits", "other keys", "device bound", "fp32",
        "separate", "no kernel",
    ],
)  # fmt: skip
def test_other_calls_stay_transformer_engines(attention, call):
    assert not attends(attention, **call)


OTHER_KINDS = {"attention_dropout": 0.1, "softmax_type": "learnable", "return_max_logit": True, "window_size": (8, 8)}


def another(*args):
    raise NotImplementedError


@pytest.mark.parametrize(
    "owner, name, value", [(None, "fused_attn_bwd", another), ("FusedAttnFunc", "forward", staticmethod(another))]
)
def test_attention_with_others_kernels_stays_transformer_engines(attention, monkeypatch, owner, name, value):
    backends = importlib.import_module(TE_ATTENTION_BACKENDS)
    monkeypatch.setattr(getattr(backends, owner) if owner else backends, name, value)
    assert not attends(attention)


@pytest.mark.parametrize("name, value", [*OTHER_KINDS.items(), ("fp8", "hybrid"), ("context_parallel_size", 2)])
def test_attention_of_another_kind_stays_transformer_engines(attention, name, value):
    owner = attention if name in OTHER_KINDS else attention.config
    assert hasattr(owner, name)
    setattr(owner, name, value)
    assert not attends(attention)
    if name == "attention_dropout":
        assert attends(attention.eval())


def chosen(attention, direct=None, flash=None):
    family = dataclasses.replace(
        QWEN3_VL,
        direct_attention=OtherAttention(refusal=lambda: direct),
        flash_attention=OtherAttention(refusal=lambda: flash),
    )
    options = VisionGraphOptions(impl="transformer_engine", attention=attention)
    kernels = RecordedKernels(options, family)
    kernels.choose_attention()
    return kernels.attention


@pytest.mark.parametrize(
    ("asked", "direct", "flash", "found", "said"),
    [
        ("auto", None, None, "cudnn", ""),
        ("auto", "no GPU", None, "transformer_engine", ""),
        ("transformer_engine", None, None, "transformer_engine", ""),
        ("cudnn", None, None, "cudnn", ""),
        ("cudnn", "no GPU", None, "transformer_engine", "no GPU; attention stays Transformer Engine's"),
        ("flash", "no package", None, "flash", ""),
        ("flash", None, "no Hopper GPU", "cudnn", "no Hopper GPU; attention stays cuDNN's, called directly"),
        ("flash", "none", "no GPU", "transformer_engine", "no GPU; attention stays Transformer Engine's"),
    ],
)
def test_attention_is_what_was_asked_for_or_its_refusal_is_said(capsys, asked, direct, flash, found, said):
    assert chosen(asked, direct, flash) == found
    lines = [line for line in capsys.readouterr().out.splitlines() if "vision_cuda_graph_attention" in line]
    assert lines == ([f"[bridge-cg] vision_cuda_graph_attention={asked}: {said}"] if said else [])
