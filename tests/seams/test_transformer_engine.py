"""What recording relies on in Transformer Engine's modules, and in megatron-core's random states."""

import importlib
import inspect
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import random
from torch import nn

from bridge_cg_plugin.announce import SAID
from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.upstream.decoder import block
from bridge_cg_plugin.upstream.encoders import radio
from bridge_cg_plugin.upstream.kernels import layers
from bridge_cg_plugin.upstream.kernels.recompute import random_states, usable_random_states
from bridge_cg_plugin.upstream.kernels.transformer_engine import (
    accumulating,
    device_lengths,
    fused_accumulation,
    warn_of_gradients,
)
from bridge_cg_plugin.upstream.seams.registry.engine import TE_ATTENTION_BACKENDS, TE_ATTENTION_UTILS
from tests.unit.packs import new_qwen
from tests.unit.toy import toy_batch, toy_region


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


@pytest.mark.parametrize("kernels", [fused_accumulation, accumulating])
@pytest.mark.parametrize("name", ["linear", "layernorm_linear"])
def test_recorded_modules_hand_on_placeholders_of_one_element(monkeypatch, kernels, name):
    """Transformer Engine's own are as large as the weights, and stay on the device for good."""
    owner = pytest.importorskip(f"transformer_engine.pytorch.module.{name}")
    before = owner.get_dummy_wgrad
    zeros, empty = torch.zeros, torch.empty
    monkeypatch.setattr(torch, "zeros", lambda *args, device=None, **kwargs: zeros(*args, **kwargs))
    monkeypatch.setattr(torch, "empty", lambda *args, device=None, **kwargs: empty(*args, **kwargs))
    with kernels([Linear()]):
        unread, read = (owner.get_dummy_wgrad([64, 32], torch.bfloat16, zero=zero) for zero in (False, True))
    for found in (unread, read):
        assert (found.shape, found.dtype, found.untyped_storage().nbytes()) == ((64, 32), torch.bfloat16, 2)
    assert not read.any() and owner.get_dummy_wgrad is before


@pytest.mark.parametrize("name, arguments", [("_checkpoint_hook", ((), {})), ("_recomputation_hook", ())])
def test_transformer_engines_checkpoint_is_known_as_one(name, arguments):
    """It counts what a forward saves, as PyTorch's does without reentrance; a replay saves nothing."""
    hook = getattr(pytest.importorskip("transformer_engine.pytorch.distributed"), name)
    frame = SimpleNamespace(count=0, recomputed=[])
    region = toy_region()
    with hook(frame, *arguments):
        assert region.run(toy_batch()) is None
    assert region.statistics.fallbacks == {"in_checkpoint": 1}
    assert region.run(toy_batch()) is not None


def unknown():
    raise RuntimeError("cuDNN version incompatibility")


@pytest.fixture
def unpacked(monkeypatch):
    """What recordings of attention that is not packed are entered into, by what they are of."""
    monkeypatch.setattr(layers, "usable_random_states", lambda modules: nullcontext())  # there are none on a CPU
    family = block.TransformerBlockFamily(new_qwen().decoder, packs=False)
    return {"RADIO": radio.RADIO.kernels, "padded rows": family.kernels}


@pytest.fixture
def backward(monkeypatch):
    """Stands in for Transformer Engine's, has its parameters, and returns what it is called with."""
    backends = importlib.import_module(TE_ATTENTION_BACKENDS)
    signature = inspect.signature(backends.fused_attn_bwd)

    def called(*args, **kwargs):
        return signature.bind(*args, **kwargs).arguments

    called.__signature__ = signature
    monkeypatch.setattr(backends, "fused_attn_bwd", called)
    # As where PyTorch was built for another cuDNN than the one that Transformer Engine has loaded.
    monkeypatch.setattr(torch.backends.cudnn, "version", unknown)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def under(version, tokens, mask):
        monkeypatch.setattr(importlib.import_module(TE_ATTENTION_UTILS), "get_cudnn_version", lambda: version)
        offsets = torch.tensor([0, tokens - 3, tokens], dtype=torch.int32)
        with device_lengths():
            found = backends.fused_attn_bwd(
                tokens, tokens, offsets, offsets, *"qkvog", None, [], None, attn_mask_type=mask
            )
        assert backends.fused_attn_bwd is called
        changed = found["cu_seqlens_q"] is not offsets
        assert (found["cu_seqlens_kv"] is not offsets) == changed and found["q"] == "q"
        return found["attn_mask_type"], found["cu_seqlens_q"].tolist() if changed else None

    return under


@pytest.mark.parametrize(
    "version, width, capability, warned",
    [
        ((9, 14, 0), 256, (9, 0), True),
        ((9, 14, 0), 128, (9, 0), False),
        ((9, 14, 0), 256, (10, 0), False),
        ((9, 18, 0), 256, (9, 0), False),
    ],
)
def test_wrong_gradients_of_wide_heads_are_named(monkeypatch, caplog, version, width, capability, warned):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.import_module(TE_ATTENTION_UTILS), "get_cudnn_version", lambda: version)
    SAID.clear()
    warn_of_gradients(width)
    assert ("cuDNN 9.14.0, whose gradients of packs are wrong" in caplog.text) == warned == bool(caplog.text)


@pytest.mark.parametrize(
    "version, copies", [((9, 15, 0), True), ((9, 1, 0), True), ((9, 15, 1), False), ((9, 19, 0), False)]
)
def test_no_replay_reads_lengths_from_the_host(backward, version, copies):
    for mask in ("no_mask", "causal", "causal_bottom_right"):
        full = "padding" if mask == "no_mask" else f"padding_{mask}"
        expected = (full, [0, 1040, 2080]) if copies else (mask, None)
        assert backward(version, 1040, mask) == expected
    assert backward(version, 1024, "no_mask") == ("no_mask", None)
    for mask in ("padding", "padding_causal", "arbitrary"):
        assert backward(version, 1040, mask) == (mask, None)


@pytest.mark.parametrize("of", ["RADIO", "padded rows"])
def test_recordings_of_unpacked_attention_take_their_lengths_from_the_device(unpacked, backward, monkeypatch, of):
    utils, backends = map(importlib.import_module, (TE_ATTENTION_UTILS, TE_ATTENTION_BACKENDS))
    monkeypatch.setattr(utils, "get_cudnn_version", lambda: (9, 14, 0))
    before = backends.fused_attn_bwd
    with unpacked[of]([]):
        assert backends.fused_attn_bwd is not before
    assert backends.fused_attn_bwd is before


def test_norms_over_heads_are_differentiated_by_what_replaces_it(monkeypatch):
    """The operation calls the name in its module, which is upstream's again behind the context."""
    import importlib

    from transformer_engine.pytorch import RMSNorm

    from bridge_cg_plugin.upstream.kernels.layers import fused_head_norms
    from bridge_cg_plugin.upstream.seams.registry.engine import TE_RMSNORM

    owner = importlib.import_module(TE_RMSNORM)
    calls = []

    def upstream(gradient, x, rstd, weight, margin, zero_centered):
        calls.append((x.shape, margin, zero_centered))
        return gradient, weight

    monkeypatch.setattr(owner, "rmsnorm_bwd", upstream)
    monkeypatch.setattr(owner, "clear_tensor_data", lambda *tensors: None)  # needs a GPU
    norm, other = (RMSNorm(width, zero_centered_gamma=True, device="cpu") for width in (128, 64))
    x, rstd = torch.ones(3, 128), torch.ones(3)
    with pytest.raises(KeyError), fused_head_norms([torch.nn.ModuleList([norm, other])]):
        assert owner.rmsnorm_bwd is not upstream
        ctx = SimpleNamespace(saved_tensors=(x, rstd), dtype=torch.float32)
        norm.op_backward(ctx, torch.ones(3, 1, 128))
        raise KeyError
    assert calls == [((3, 128), 0, True)] and owner.rmsnorm_bwd is upstream
    with fused_head_norms([other]):
        assert owner.rmsnorm_bwd is upstream


class Tracker:
    """A tracker that counts forks."""

    def __init__(self):
        self.forks = 0

    @contextmanager
    def fork(self, name="model-parallel-rng"):
        self.forks += 1
        yield


@pytest.fixture
def tracker(active, monkeypatch):
    found = Tracker()
    monkeypatch.setattr(random, "get_cuda_rng_tracker", lambda: found)
    states(monkeypatch, torch.zeros(3))
    return found


def states(monkeypatch, state):
    monkeypatch.setattr(random, "get_all_rng_states", lambda: {"model-parallel-rng": state})


def layer(training=True, **config):
    module = nn.Linear(2, 2).train(training)
    module.config = SimpleNamespace(**{"attention_dropout": 0.0, "hidden_dropout": 0.0, **config})
    return module


def test_a_fork_without_a_draw_is_left_out_of_recorded_work_only(tracker):
    with usable_random_states([layer()]), tracker.fork(), tracker.fork("other"):
        assert tracker.forks == 0
    with tracker.fork():
        assert tracker.forks == 1
    assert random_states() == ()


def test_states_that_a_graph_can_use_are_forked(tracker, monkeypatch):
    states(monkeypatch, torch.Generator())
    with usable_random_states([layer(attention_dropout=0.1)]), tracker.fork():
        assert tracker.forks == 1


@pytest.mark.parametrize("option", ["attention_dropout", "hidden_dropout"])
def test_a_draw_is_refused_with_what_to_do(tracker, option):
    with (
        pytest.raises(CaptureError, match=rf"{option} draws.*te_rng_tracker=True"),
        usable_random_states([layer(**{option: 0.1})]),
        tracker.fork(),
    ):
        pass
    with tracker.fork():
        assert tracker.forks == 1
