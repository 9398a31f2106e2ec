"""Token ids that the host knows, from Bridge's batch to its model's forward, and a pack's offsets with them."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from bridge_cg_plugin.upstream.hooks import batches, between
from bridge_cg_plugin.upstream.hooks.batches import PACK_OFFSETS, TOKENS
from bridge_cg_plugin.upstream.hooks.between import STEP_TOKENS
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.registry import seam

pytestmark = pytest.mark.skipif(
    not seam("step_padding").expected_in(bridge_release()), reason="this release's step has no such packing"
)
FIELDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


@pytest.fixture
def step(active, monkeypatch):
    """Bridge's step, as it is and with the patch."""
    monkeypatch.setattr(between, "any_on_graphs", lambda: True)
    module = importlib.import_module(seam("step_padding").module)
    patched = module._pad_and_pack_qwen3_vl_step
    return SimpleNamespace(old=patched.__wrapped__, new=patched)


def groups(tensor=1, context=1):
    return SimpleNamespace(tp=SimpleNamespace(size=lambda: tensor), cp=SimpleNamespace(size=lambda: context))


def batch(samples=2, length=13):
    tokens = torch.randint(0, 60, (samples, length), generator=torch.Generator().manual_seed(length))
    return tokens, tokens.roll(-1, 1), torch.ones(samples, length), None, torch.arange(length).expand(samples, -1)


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and found.device == expected.device and found.equal(expected)
    return found == expected


@pytest.mark.parametrize(
    "sizes, fp8, length",
    [((1, 1), False, None), ((2, 1), True, 8), ((2, 2), False, 48), ((2, 2), True, None), ((1, 1), False, 8)],
    ids=str,
)
def test_a_padded_batch_is_upstreams(step, sizes, fp8, length):
    given = (*batch(), groups(*sizes), fp8, length is not None, length)
    *expected, params = step.old(*given)
    *found, described = step.new(*given)
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
    assert all(same(getattr(described, name), value) for name, value in vars(params).items())


@pytest.mark.parametrize("length", [13, 16])
def test_tokens_and_offsets_of_a_device_are_known(step, length):
    given = batch(length=length)
    device = given[0].to("meta")
    TOKENS.remember(device, given[0])
    reads = PACK_OFFSETS.device_reads
    *found, params = step.new(device, *given[1:], groups(), True)
    *expected, described = step.old(*given, groups(), True)
    assert params.max_seqlen_q == described.max_seqlen_q == 16
    for name in FIELDS:
        offsets = getattr(params, name)
        assert offsets.device.type == "meta" and PACK_OFFSETS.values(offsets) == (0, 16, 32)
    assert params.cu_seqlens_q is params.cu_seqlens_kv and params.cu_seqlens_q is not params.cu_seqlens_q_padded
    assert PACK_OFFSETS.device_reads == reads
    tokens = found[0]
    assert tokens.device.type == "meta" and tokens.shape == expected[0].shape
    made = tokens.clone()
    assert type(made) is torch.Tensor
    assert TOKENS.known(made).equal(expected[0]) and STEP_TOKENS.known(made).equal(expected[0])
    assert type(tokens + 1) is torch.Tensor and STEP_TOKENS.known(tokens + 1) is None
    assert STEP_TOKENS.known(made.clone()) is None


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", ["tokens", "input_ids"])
def test_a_batch_step_notes_tokens_where_graphs_are_on(graphs, name, monkeypatch):
    monkeypatch.setattr(batches, "any_on_graphs", lambda: graphs)
    host = torch.arange(8).view(2, 4)
    step = batches.PATCHES[0].make(lambda data: {key: value.to("meta") for key, value in next(data).items()})
    found = step(iter([{name: host}]))[name]
    assert found.device.type == "meta"
    assert TOKENS.known(found).equal(host) if graphs else TOKENS.known(found) is None
