"""Which kernels Hugging Face's encoders attend by, and that cuDNN's and FlashAttention's are handed what they take."""

import dataclasses
import json

import pytest
import torch

from bridge_cg_plugin.attention_bounds import CUDNN_FROM
from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.encoders import direct_attention
from bridge_cg_plugin.upstream.encoders.direct_attention import segment_attention_refusal
from bridge_cg_plugin.upstream.encoders.glm45v import GLM45V
from bridge_cg_plugin.upstream.encoders.pixtral import PIXTRAL
from bridge_cg_plugin.upstream.encoders.qwen3_omni import QWEN3_OMNI, QWEN3_OMNI_AUDIO
from bridge_cg_plugin.upstream.encoders.qwen25_vl import QWEN25_OMNI, QWEN25_VL
from bridge_cg_plugin.upstream.encoders.siglip import SIGLIP
from bridge_cg_plugin.vision.encoder import RecordedKernels
from bridge_cg_plugin.vision.kernels import cudnn_attention
from tests.scripts import interpreted

PACKED = (QWEN25_VL, GLM45V, QWEN25_OMNI, QWEN3_OMNI, PIXTRAL)


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that lets this process have a GPU of some kind, with the package."""

    def have(capability=(9, 0), reason=None):
        monkeypatch.setattr(direct_attention, "kernels_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *unused: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *unused: "A GPU")
        monkeypatch.setattr(cudnn_attention, "unavailable", lambda: reason)

    return have


def chosen(family, **options):
    kernels = RecordedKernels(VisionGraphOptions(impl="transformer_engine", **options), family)
    kernels.choose_attention()
    return kernels.attention


@pytest.mark.parametrize("family", PACKED, ids=lambda family: family.name)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "cudnn"),
        ({"kernels": "fast"}, "cudnn"),
        ({"kernels": "exact"}, "transformer_engine"),
        ({"kernels": "exact", "attention": "cudnn"}, "cudnn"),
        ({"kernels": "fast", "attention": "transformer_engine"}, "transformer_engine"),
    ],
    ids=["default", "fast", "exact", "cudnn", "own"],
)
def test_kernels_that_round_otherwise_are_allowed_or_asked_for(gpu, capsys, family, options, expected):
    gpu()
    assert chosen(family, **options) == expected
    assert "attention" not in capsys.readouterr().out


@pytest.mark.parametrize("family", [SIGLIP, QWEN3_OMNI_AUDIO], ids=lambda family: family.name)
def test_encoders_that_equal_eager_to_the_bit_keep_eagers_kernels(gpu, family):
    gpu()
    assert chosen(family, kernels="fast") == chosen(family, attention="cudnn") == "transformer_engine"


def test_deterministic_algorithms_keep_pytorchs_kernels(gpu, monkeypatch):
    gpu()
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert chosen(QWEN3_OMNI) == chosen(QWEN3_OMNI, attention="cudnn") == "transformer_engine"


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({}, None),
        ({"capability": (10, 0)}, None),
        ({"capability": (8, 0)}, "A GPU is older than Hopper GPUs"),
        ({"reason": "no package"}, "no package"),
    ],
    ids=["Hopper", "Blackwell", "Ampere", "no package"],
)
def test_where_cudnn_attends(gpu, monkeypatch, capsys, machine, reason):
    """Other kernels of eager's do not matter: it does not attend by Transformer Engine."""
    gpu(**machine)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    refusal = segment_attention_refusal()
    assert refusal is None if reason is None else reason in refusal
    assert chosen(GLM45V) == ("cudnn" if reason is None else "transformer_engine")
    assert not capsys.readouterr().out
    chosen(GLM45V, attention="cudnn", kernels="exact")
    said = capsys.readouterr().out
    assert not said if reason is None else f"{refusal}; attention stays PyTorch's" in said


SCRIPT = """
import json
from dataclasses import replace

import torch

from tests.interpreted import prepare
from tests.segment_plans import use_reference_plans

prepare()
planned = use_reference_plans()
from bridge_cg_plugin.upstream.encoders import direct_attention, flash_attention, packed_towers
from bridge_cg_plugin.vision.kernels import cudnn_attention, rotary
from bridge_cg_plugin.vision.kernels.packed_attention import PackedSegments, packed_attention
from tests.models import tower
from tests.models.encoders import ENCODERS
from scripts.performance import encoders as benchmark
from scripts.performance.parity_encoders import Comparison

packed_towers.has_kernels = lambda tensor: True
direct_attention.kernels_available = lambda: True
torch.cuda.get_device_capability = lambda *unused: (9, 0)
cudnn_attention.unavailable = flash_attention.unavailable = lambda: None
packed_towers.cudnn_pays = lambda segments, largest, tokens: largest >= 8
flash_attention.FLASH_FROM = 8
flash_attention.takes = lambda width, dtype: True
flashes = []

def flash(query, key, value, offsets, largest, scale):
    flashes.append(largest)
    return packed_attention(query, key, value, PackedSegments(offsets, largest), scale)

flash_attention.flash_attention = flash
rotated = []
launch = rotary._launch
rotary._launch = lambda *args: rotated.append(args[5]) or launch(*args)

class OneMix:
    def capacities(self, model, most):
        return (most,)

    def draw(self, model, rng, most):
        return [(1, 2, 4), (1, 2, 2)]

tower.start_process()
found = {}
MODES = dict(benchmark.MODES)
MODES["plugin_flash"] = {"kernels": "exact", "attention": "flash"}
MODES["plugin_fast_flash"] = {"kernels": "fast", "attention": "flash"}
from scripts.performance import parity_encoders
parity_encoders.MODES = MODES
for name, mode, agrees in RUNS:
    flash_attention.agrees = lambda width, dtype, device: agrees
    planned.clear(), flashes.clear()
    compared = Comparison(name, replace(ENCODERS[name], mixes=OneMix()), 2, 16, mode)
    captured = len(planned), len(flashes)
    rotated.clear()
    _, plugin = compared.records(1)
    compared.close()
    shapes = sorted({(s.segments, s.largest, s.tokens) for s in planned})
    found[f"{name} {mode} {agrees}"] = {
        "fallback": plugin["fallback"], "differ": [plugin["forward_rel"], plugin["grad_rel"]],
        "called": captured, "shapes": shapes, "rounded": list(rotated),
    }
print(json.dumps(found))
"""
# One projection for queries, keys and values, or three; Ministral's rotation rounds. All others share this code.
JOINT, ROUNDED, SEPARATE = "glm45v", "ministral3", "qwen25_omni"
RUNS = [(JOINT, "plugin_flash", True), (ROUNDED, "plugin", True), (JOINT, "plugin_fast_flash", False)]
RUNS += [(name, "plugin_cudnn", True) for name in (JOINT, ROUNDED, SEPARATE)]


@pytest.fixture(scope="module")
def found():
    return json.loads(interpreted(SCRIPT.replace("RUNS", repr(RUNS))).splitlines()[-1])


def assert_equals_eager(one):
    assert one["fallback"] is None
    assert one["differ"][0] <= 1e-6 and one["differ"][1] <= 2e-5


@pytest.mark.parametrize("name", [JOINT, ROUNDED, SEPARATE])
def test_replays_by_cudnn_equal_eager(found, name):
    one = found[f"{name} plugin_cudnn True"]
    assert_equals_eager(one)
    assert one["called"][0] and not one["called"][1]
    assert all(largest == 16 and tokens == 16 for _, largest, tokens in one["shapes"]), one["shapes"]
    assert one["rounded"] and set(one["rounded"]) == {name == ROUNDED}


@pytest.mark.parametrize(("run", "flash"), [("plugin_flash True", True), ("plugin_fast_flash False", False)])
def test_flash_attention_replays_where_it_computes_the_same_attention_and_else_the_default(found, run, flash):
    one = found[f"{JOINT} {run}"]
    assert_equals_eager(one)
    assert list(map(bool, one["called"])) == [not flash, flash]


def test_exact_kernels_keep_pytorchs_and_rotate_by_the_plugins(found):
    one = found[f"{ROUNDED} plugin True"]
    assert_equals_eager(one)
    assert one["called"] == [0, 0] and one["rounded"] == [True] * (2 * 2 * 2)  # forward and backward


def test_a_shape_that_cudnn_has_no_kernel_for_attends_by_pytorchs(monkeypatch):
    pytest.importorskip("triton")
    from bridge_cg_plugin.upstream.encoders import packed_towers
    from bridge_cg_plugin.vision.kernels import cudnn_attention, rotary
    from bridge_cg_plugin.vision.kernels.packed_attention import PackedSegments

    asked = []
    monkeypatch.setattr(cudnn_attention, "segment_plans", lambda shape, device: asked.append(shape))
    mixed = torch.randn(CUDNN_FROM, 3, 2, 8)
    table = torch.ones(CUDNN_FROM, 8)
    rotation = dataclasses.replace(packed_towers.Rotation.of(table, table), halves=(table[:, :4], table[:, :4]))
    plain = dataclasses.replace(rotation, halves=None)
    segments = PackedSegments(torch.tensor([0, CUDNN_FROM], dtype=torch.int32), CUDNN_FROM)
    monkeypatch.setattr(rotary, "apply_rotary", lambda x, *tables: x)
    monkeypatch.setattr(packed_towers, "_locate", direct_attention.located())
    found, plainly = (
        packed_towers.attend((mixed,), lambda query, key, *tables: (query, key), each, segments, 0.3)
        for each in (rotation, plain)
    )
    assert len(asked) == 1 and (asked[0].segments, asked[0].largest) == (1, CUDNN_FROM)
    assert torch.equal(found, plainly)
