"""cuDNN's attention in place of Transformer Engine's call while a region is recorded."""

import dataclasses
import importlib
from unittest import mock

import pytest
import torch

from bridge_cg_plugin.graphs.instance import InstanceMethod
from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.encoders import direct_attention
from bridge_cg_plugin.upstream.encoders.qwen3_vl import QWEN3_VL, pack_segments
from bridge_cg_plugin.upstream.kernels import layers as layer_kernels
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.seam import NEWEST
from bridge_cg_plugin.vision.encoder import OtherAttention, RecordedKernels
from tests.scripts import interpreted
from tests.unit.towers import new_tower

pytest.importorskip("triton")

from bridge_cg_plugin.vision.kernels import cudnn_attention

TOWER_SCRIPT = """
import torch
from megatron.core.transformer.enums import AttnMaskType

from bridge_cg_plugin.upstream.encoders import direct_attention
from bridge_cg_plugin.upstream.kernels.layers import fused_layer_kernels
from bridge_cg_plugin.upstream.encoders.qwen3_vl import pack_segments
from bridge_cg_plugin.upstream.kernels.rotary import fused_rotary
from bridge_cg_plugin.vision.batch import EncoderBatch, shape_of
from bridge_cg_plugin.upstream.encoders.qwen3_vl import Qwen3VLEncoder
from bridge_cg_plugin.graphs.buckets import Bucket
from tests.interpreted import prepare
from tests.segment_plans import use_reference_plans
from tests.unit.towers import draw, new_tower

prepare()
planned = use_reference_plans()
tower = new_tower().half()
for layer in tower.decoder.layers:  # core 0.17 has another mask in its layers without Transformer Engine, unread here
    layer.self_attention.attn_mask_type = AttnMaskType.no_mask
attentions = [layer.self_attention.core_attention for layer in tower.decoder.layers]
for module in attentions:  # what stands in for Transformer Engine's on a CPU, set up as that
    module.softmax_scale, module.attention_dropout, module.window_size = 16**-0.5, 0.0, (-1, -1)
    module.softmax_type, module.return_max_logit, module.config = "vanilla", False, tower.config
direct_attention.is_te_attention = attentions.__contains__
pixels, grid = draw([[1, 4, 6], [2, 2, 2]])
bucket = Bucket(40, (8, 32))
program = Qwen3VLEncoder(tower)
buffers = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in program.input_specs(bucket).items()}
ROWS = ((1, 4, 6), (2, 2, 2))
program.load(buffers, EncoderBatch(pixels.half(), ROWS, shape_of(ROWS), grid))
rows = 32 // tower.config.spatial_merge_size**2

def run():
    outputs = [o[:rows] for o in program.forward(buffers, bucket)]
    parameters = [p for p in tower.parameters() if p.requires_grad]
    loss = sum((o.float() * torch.linspace(0.5, 1.5, o.numel()).view(o.shape)).sum() for o in outputs)
    return [*outputs, *torch.autograd.grad(loss, parameters)]

with fused_rotary([tower]), fused_layer_kernels([tower]):
    expected = run()
    assert not planned
    with direct_attention.direct_attention([tower]):
        found = run()
assert {(s.segments, s.largest, s.tokens) for s in planned} == {(8, 32, 40)}, planned
assert len(planned) == len(tower.decoder.layers)
for a, b in zip(found, expected, strict=True):
    difference = float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-3))
    assert difference < 3e-2, difference
print("same", len(found))
"""


@pytest.mark.skipif(bridge_release() != NEWEST.bridge, reason="kernels are the same beside every release")
def test_a_tower_that_attends_directly_computes_the_same():
    written = interpreted(TOWER_SCRIPT)
    assert written.strip().splitlines()[-1].startswith("same")


SET_UP = {
    "softmax_scale": 0.25, "attention_dropout": 0.0, "softmax_type": "vanilla", "return_max_logit": False,
    "window_size": (-1, -1),
}  # fmt: skip


def te_attention_class():
    return importlib.import_module(layer_kernels.EXTENSIONS).TEDotProductAttention


@pytest.fixture
def attention():
    """Return Transformer Engine's attention module of a layer."""
    kind = te_attention_class()
    made = kind.__new__(kind)  # its constructor needs a GPU
    torch.nn.Module.__init__(made)
    made.config = new_tower().config
    for name, value in SET_UP.items():
        setattr(made, name, value)
    return made


def qkv(tokens=300, dtype=torch.bfloat16):
    return torch.zeros(tokens, 2, 3, 16, dtype=dtype).unbind(2)


def packed(segments=4, largest=128):
    return pack_segments(torch.zeros(segments + 1, dtype=torch.int32), largest)


def mask(name="no_mask"):
    return importlib.import_module("megatron.core.transformer.enums").AttnMaskType[name]


def attends(attention, parts=None, args=(None,), **kwargs):
    given = {"packed_seq_params": packed(), "attn_mask_type": mask(), "attention_bias": None, **kwargs}
    reached = []
    below = InstanceMethod(attention, "forward", lambda *args, **kwargs: reached.append(args))
    with (
        mock.patch.object(cudnn_attention, "plans_for", lambda *unused: "plans"),
        mock.patch.object(cudnn_attention, "segment_attention", lambda query, *unused: query.contiguous()),
        direct_attention.direct_attention([attention]),
    ):
        attention.forward(*(parts or qkv()), *args, **given)
    below.restore()
    return not reached


def test_packed_segments_of_one_projection_attend_directly(attention):
    assert attends(attention)
    assert attends(attention, attn_mask_type=mask("padding"))
    assert attends(attention, packed_seq_params=packed(1))


CHANGED = pack_segments(torch.zeros(5, dtype=torch.int32), 128)
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
        {"packed_seq_params": packed(1), "parts": qkv(768)},
        {"parts": qkv(dtype=torch.float32)},
        {"parts": tuple(part.clone() for part in qkv())},
    ],
    ids=[
        "causal", "no mask type", "bias", "mask", "splits", "other keys", "device bound", "one large segment", "fp32",
        "separate",
    ],
)  # fmt: skip
def test_other_calls_stay_transformer_engines(attention, call):
    assert not attends(attention, **call)


@pytest.mark.parametrize(
    ("name", "value"),
    [("attention_dropout", 0.1), ("softmax_type", "learnable"), ("return_max_logit", True), ("window_size", (8, 8))],
)
def test_attention_of_another_kind_stays_transformer_engines(attention, name, value):
    assert hasattr(attention, name)
    setattr(attention, name, value)
    assert not attends(attention)
    if name == "attention_dropout":
        assert attends(attention.eval())


@pytest.mark.parametrize(("name", "value"), [("fp8", "hybrid"), ("context_parallel_size", 2)])
def test_a_configuration_of_another_kind_stays_transformer_engines(attention, name, value):
    assert hasattr(attention.config, name)
    setattr(attention.config, name, value)
    assert not attends(attention)


def test_a_shape_without_a_kernel_stays_transformer_engines(attention, monkeypatch):
    monkeypatch.setattr(cudnn_attention, "segment_plans", lambda shape, device: None)
    InstanceMethod(attention, "forward", lambda *args, **kwargs: "packed")
    with direct_attention.direct_attention([attention]):
        found = attention.forward(*qkv(), None, attn_mask_type=mask(), packed_seq_params=packed())
    assert found == "packed"


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
    lines = [line for line in capsys.readouterr().out.splitlines() if "vision_cuda_graph_tuning.attention" in line]
    assert lines == ([f"[bridge-cg] vision_cuda_graph_tuning.attention={asked}: {said}"] if said else [])
