"""FlashAttention in place of Transformer Engine's call of cuDNN while a region is recorded."""

import dataclasses
import functools
import importlib
import inspect
import types

import pytest
import torch

from bridge_cg_plugin.graphs.instance import InstanceMethod
from bridge_cg_plugin.upstream.encoders import direct_attention
from tests.seams.test_direct_attention import attention, mask, packed, qkv  # noqa: F401

pytest.importorskip("triton")

from bridge_cg_plugin.upstream.encoders import flash_attention


@dataclasses.dataclass(frozen=True)
class Blocks:
    m_block_size: int = 64
    n_block_size: int = 128
    AtomLayoutMdQ: int = 1
    dQ_single_wg: bool = True
    num_wg: int = 2


class Package:
    """What the plugin uses of the package, in plain fp32: attention by segments, in kernels that must agree."""

    def __init__(self, wrong=0.0):
        self.wrong, self.widths, self.blocks = wrong, [], []
        self.module = types.SimpleNamespace(
            _flash_attn_fwd=self.forward,
            _flash_attn_bwd=self.backward,
            _bwd_preprocess=self.cached(self.preprocess),
            _bwd_postprocess_convert=self.cached(self.preprocess),
            _tile_size_bwd_sm90=lambda *args, **kwargs: Blocks(),
        )

    def cached(self, kernel):
        named = functools.partial(kernel)
        named.compile_cache, named.__name__ = {}, "kernel"
        return named

    def preprocess(self, *, hdim_multiple_of=32):
        self.widths.append(hdim_multiple_of)

    def forward(self, query, key, value, *, return_lse, cu_seqlens_q, softmax_scale, **bounds):
        assert return_lse and bounds["cu_seqlens_k"] is cu_seqlens_q
        out = self.plain(query, key, value, cu_seqlens_q, softmax_scale)
        return out.to(query.dtype), torch.zeros(query.shape[1], query.shape[0]), None, None, None

    def backward(self, query, key, value, out, gradient, lse, *, dq, dk, dv, cu_seqlens_q, softmax_scale, **bounds):
        module = self.module
        self.blocks.append(module._tile_size_bwd_sm90(query.shape[-1]))
        for kernel in (module._bwd_preprocess, module._bwd_postprocess_convert):
            assert kernel.compile_cache == {}
            kernel(hdim_multiple_of=32)
        with torch.enable_grad():
            parts = [part.detach().float().requires_grad_() for part in (query, key, value)]
            found = self.plain(*parts, cu_seqlens_q, softmax_scale)
            gradients = torch.autograd.grad(found, parts, gradient.float())
        for place, found in zip((dq, dk, dv), gradients, strict=True):
            place.copy_(found)
        dq.mul_(1 + self.wrong)

    def plain(self, query, key, value, offsets, scale):
        out = torch.full(query.shape, 7.0)
        ends = offsets.tolist()
        for begin, end in zip(ends, ends[1:], strict=False):
            q, k, v = (part[begin:end].float() for part in (query, key, value))
            weights = (torch.einsum("qhd,khd->hqk", q, k) * scale).softmax(-1)
            out = torch.cat([out[:begin], torch.einsum("hqk,khd->qhd", weights, v), out[end:]])
        return out


@pytest.fixture
def package(monkeypatch):
    """Return a function that puts a package in the real one's place."""
    flash_attention.agrees.cache_clear()

    def use(**kwargs):
        made = Package(**kwargs)
        monkeypatch.setattr(flash_attention.importlib, "import_module", lambda name: made.module)
        monkeypatch.setattr(flash_attention, "clear_padding", lambda x, offsets: x[int(offsets[-1]) :].zero_())
        monkeypatch.setattr(flash_attention, "_version", lambda: "4.0")
        return made

    yield use
    flash_attention.agrees.cache_clear()


def test_padding_is_zero_and_gradients_lie_interleaved(package):
    from bridge_cg_plugin.vision.kernels.cudnn_attention import lie_interleaved

    package()
    parts = [part.requires_grad_() for part in torch.randn(20, 2, 3, 72).bfloat16().detach().unbind(2)]
    offsets = torch.tensor([0, 6, 6, 15], dtype=torch.int32)
    out = flash_attention.flash_attention(*parts, offsets, 16, 0.1)
    gradients = torch.autograd.grad(out, parts, torch.ones_like(out))
    assert not out[15:].any() and not any(g[15:].any() for g in gradients)
    assert all(g[:15].any() for g in gradients) and lie_interleaved(*gradients)


@pytest.mark.parametrize(("width", "rounded", "rows"), [(72, 16, 128), (80, 16, 128), (64, 32, 64), (96, 32, 64)])
def test_all_kernels_of_the_backward_round_a_head_alike(package, width, rounded, rows):
    made = package()
    before = dict(vars(made.module))
    flash_attention._distance_from_fp32(width, torch.bfloat16, torch.device("cpu"))
    assert made.widths == [rounded] * 2
    assert [blocks.m_block_size for blocks in made.blocks] == [rows]
    assert made.blocks[0].num_wg == 2
    assert vars(made.module) == before


@pytest.mark.parametrize("wrong", [0.0, 0.5, float("nan")])
def test_a_release_is_used_if_it_computes_attention(package, monkeypatch, wrong):
    package(wrong=wrong)
    said = []
    monkeypatch.setattr(flash_attention, "warn", said.append)
    on_cpu(monkeypatch)
    assert [flash_attention.agrees(72, torch.bfloat16, 0) for _ in range(2)] == [not wrong] * 2
    fails = "flash-attn-4 4.0 fails for heads of 72, which other kernels compute"
    assert [each[: len(fails)] for each in said] == ([fails] if wrong else [])


def on_cpu(monkeypatch):
    monkeypatch.setattr(flash_attention.torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(flash_attention.torch.cuda, "device", lambda device: torch.device("cpu"))
    distance = flash_attention._distance_from_fp32
    monkeypatch.setattr(
        flash_attention, "_distance_from_fp32", lambda width, dtype, device: distance(width, dtype, torch.device("cpu"))
    )


@pytest.fixture
def calls(monkeypatch):
    """Record what FlashAttention is called with."""
    found = []

    def attend(query, key, value, offsets, largest, scale):
        found.append((offsets, largest, scale))
        return query + 1

    monkeypatch.setattr(flash_attention, "flash_attention", attend)
    monkeypatch.setattr(flash_attention, "agrees", lambda width, dtype, device: True)
    monkeypatch.setattr(flash_attention, "takes", lambda width, dtype: True)
    return found


def attend(attention, parts=None, **kwargs):  # noqa: F811
    below = InstanceMethod(attention, "forward", lambda *args, **kwargs: "before")
    with direct_attention.flash_attention([attention]):
        given = {"attn_mask_type": mask(), "packed_seq_params": packed(largest=1024), **kwargs}
        found = attention.forward(*(parts or qkv()), None, **given)
    below.restore()
    return found


def test_long_segments_are_attended_by_flash(attention, calls):  # noqa: F811
    parts, segments = qkv(), packed(largest=1024)
    out = attend(attention, parts, packed_seq_params=segments)
    assert torch.equal(out, (parts[0] + 1).view(300, -1))
    assert len(calls) == 1 and calls[0][0] is segments.cu_seqlens_q and calls[0][1:] == (1024, 0.25)


@pytest.mark.parametrize(
    "call",
    [
        {"packed_seq_params": None},
        {"packed_seq_params": packed(largest=flash_attention.FLASH_FROM - 1)},
        {"attn_mask_type": mask("causal")},
        {"attention_bias": torch.zeros(1)},
        {"parts": qkv(dtype=torch.float32)},
    ],
    ids=["unpacked", "short", "causal", "bias", "fp32"],
)
def test_other_calls_stay_as_they_are(attention, calls, call):  # noqa: F811
    assert attend(attention, **call) == "before" and not calls


@pytest.mark.parametrize("name", ["takes", "agrees"])
def test_heads_that_it_cannot_take_stay_as_they_are(attention, calls, monkeypatch, name):  # noqa: F811
    monkeypatch.setattr(flash_attention, name, lambda *args: False)
    assert attend(attention) == "before" and not calls


def test_a_missing_or_changed_package_refuses(monkeypatch, package):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    made = package()
    assert flash_attention.unavailable() is None
    del made.module._tile_size_bwd_sm90
    assert flash_attention.unavailable() == "flash-attn-4 4.0 has no _tile_size_bwd_sm90"
    monkeypatch.setattr(
        flash_attention.importlib, "import_module", lambda name: (_ for _ in ()).throw(ModuleNotFoundError("no flash"))
    )
    assert "flash-attn-4 cannot be used (ModuleNotFoundError: no flash)" in flash_attention.unavailable()


def test_the_real_package_has_what_is_used():
    interface = pytest.importorskip(flash_attention.INTERFACE, reason="needs requirements/flash.txt")
    source = inspect.getsource(interface._flash_attn_bwd)
    assert source.count("hdim_multiple_of=hdim_multiple_of") >= 2 and "_tile_size_bwd_sm90(" in source
    assert "hdim_multiple_of" in inspect.signature(interface._bwd_preprocess).parameters
    assert set(flash_attention.BLOCKS) <= set(inspect.signature(interface.BwdConfig).parameters)
    assert importlib.import_module("flash_attn.cute.flash_bwd_sm90")
