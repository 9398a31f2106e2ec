"""Padded batches are packed as upstream packs them, to the bit and without a read of the device."""

import importlib
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bridge_cg_plugin.upstream.hooks import between
from bridge_cg_plugin.upstream.hooks.batches import KEPT, PACK_OFFSETS, TOKENS
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.registry import seam
from bridge_cg_plugin.upstream.seams.seam import drift
from bridge_cg_plugin.upstream.seams.source_reader import SourceReader
from tests.unit.waits import no_host_waits

from .qwen_batches import BATCHES, make, same

pytestmark = pytest.mark.usefixtures("graphs_wanted")


def groups(tensor=1, context=1, rank=0):
    of = SimpleNamespace
    return of(tp=of(size=lambda: tensor), cp=of(size=lambda: context, rank=lambda: rank))


LAYOUTS = [groups(), groups(2), *(groups(context=2, rank=r) for r in range(2)), groups(2, 2, 1)]
LAYOUT_NAMES = ["one rank", "tensor", "context, first", "context, last", "both"]
every_layout = pytest.mark.parametrize("ranks", LAYOUTS, ids=LAYOUT_NAMES)


PADDED = "padding that leaves uneven lengths"
MASKS = {
    "no padding": [16, 16, 16],
    "padding behind": [16, 11],
    PADDED: [13, 7, 6],
    "rows that fit no layout": [15, 15],
    "holes": [16, 9],
}


def mask_of(name):
    kept = torch.arange(max(MASKS[name]))[None] < torch.tensor(MASKS[name])[:, None]
    if name == "holes":
        kept[0, 3:6] = False
    return kept


@every_layout
@pytest.mark.parametrize("name, width", zip(MASKS, [(3,), (), (3,), (), (3,)], strict=True))
def test_padded_batches_are_packed_as_upstream_packs_them(modelling, ranks, name, width):
    new, old = modelling.preprocess_packed_seqs, modelling.preprocess_packed_seqs.__wrapped__
    mask = mask_of(name)
    values = torch.randn(*mask.shape, *width)
    given = [values.clone().requires_grad_() for _ in range(2)]
    expected, params = old(given[0], mask, True, ranks)
    with no_host_waits() if name == "no padding" else nullcontext():
        found, described = new(given[1], mask, True, ranks)
    assert found.equal(expected) and vars(described).keys() == vars(params).keys()
    for packed in (found, expected):
        (packed * torch.arange(packed.numel()).view_as(packed)).sum().backward()
    assert given[1].grad.equal(given[0].grad)
    for field, value in vars(params).items():
        assert same(getattr(described, field), value)
    # As between two ranks' packs, whose layout is another one.
    assert new(values, mask, True, groups(2, 2, 0))[0].equal(old(values, mask, True, groups(2, 2, 0))[0])


def views(tensor):
    """Return views that share a tensor's memory and its first element."""
    return tensor, tensor[:2], tensor.view(2 * len(tensor), -1), tensor.view(4, -1)


def test_rows_are_those_of_the_view_of_a_mask_that_is_given(modelling):
    kept = torch.arange(16)[None] < torch.tensor([16, 11, 3, 7])[:, None]
    ids = torch.arange(64).view(4, 16)
    tokens, mask, old = ids.to("meta"), kept.to("meta"), modelling.preprocess_packed_seqs.__wrapped__
    for device, host, device_mask, host_mask in zip(views(tokens), views(ids), views(mask), views(kept), strict=True):
        TOKENS.remember(device, host)
        KEPT.remember(device_mask, host_mask)
        packed = modelling.preprocess_packed_seqs(device, device_mask, True, groups())[0]
        assert TOKENS.known(packed).equal(old(host, host_mask, True, groups())[0])


def test_a_row_that_upstream_takes_several_times_is_its_own(modelling):
    mask = torch.arange(16)[None] < torch.tensor([16, 5])[:, None]
    ranks = groups(4, 2, 1)
    assert between.packed_rows(modelling.preprocess_packed_seqs.__wrapped__, mask, mask, ranks) is None
    given = [torch.randn(2, 16, generator=torch.Generator().manual_seed(0), requires_grad=True) for _ in range(2)]
    for packing, values in zip(
        (modelling.preprocess_packed_seqs, modelling.preprocess_packed_seqs.__wrapped__), given, strict=True
    ):
        packed = packing(values, mask, True, ranks)[0]
        (packed * torch.arange(packed.numel()).view_as(packed)).sum().backward()
    assert given[0].grad.equal(given[1].grad)


@every_layout
@pytest.mark.parametrize("of_the_step", [False, True], ids=["another loop's", "the step's"])
def test_a_batch_that_the_host_knows_is_packed_without_the_device(modelling, ranks, of_the_step):
    kept = mask_of(PADDED)
    host = torch.arange(kept.numel()).view(kept.shape)
    if of_the_step:  # which pads no sample of its own
        host = make(BATCHES["a text-only sample"])["input_ids"]
        kept = torch.ones(host.shape, dtype=torch.bool)
    tokens, mask = host.to("meta"), kept.to("meta")
    TOKENS.remember(tokens, host)
    _ = between.STEP_TOKENS.remember(tokens, host) if of_the_step else KEPT.remember(mask, kept)
    expected = modelling.preprocess_packed_seqs.__wrapped__(host, kept, True, ranks)[0]
    for _ in range(2):
        assert TOKENS.known(modelling.preprocess_packed_seqs(tokens, mask, True, ranks)[0]).equal(expected)
    features = torch.zeros(*host.shape, 3, device="meta")
    assert modelling.preprocess_packed_seqs(features, mask, True, ranks)[0].shape == (*expected.shape, 3)


@pytest.mark.parametrize("known", [(), (TOKENS,)], ids=["unknown tokens", "tokens of another step"])
def test_a_batch_whose_padding_is_unknown_is_upstreams(modelling, known):
    tokens = torch.zeros(2, 16, dtype=torch.long, device="meta")
    for copies in known:
        copies.remember(tokens, torch.zeros(2, 16, dtype=torch.long))
    with pytest.raises((NotImplementedError, RuntimeError)):  # upstream reads the device
        modelling.preprocess_packed_seqs(tokens, torch.ones(2, 16, dtype=torch.bool, device="meta"), True, groups())


def test_a_step_with_another_mask_is_drift():
    step = seam("step_packing")
    found = SourceReader().find(step)
    assert drift(step, found) == []
    for line in ("original_tokens = tokens.clone()", "attention_mask = torch.ones("):
        assert drift(step, replace(found, code=found.code.replace(line, "pass")))


# Token ids that the host knows, from Bridge's batch to its model's forward, and a pack's offsets with them.

PACKING = seam("step_padding")
FIELDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


@pytest.fixture
def step(active):
    """Bridge's step, as it is and with the patch."""
    if not PACKING.expected_in(bridge_release()):
        pytest.skip("this release's step has no such packing")
    patched = importlib.import_module(PACKING.module)._pad_and_pack_qwen3_vl_step
    return SimpleNamespace(old=patched.__wrapped__, new=patched)


def batch(samples=2, length=13):
    tokens = torch.randint(0, 60, (samples, length), generator=torch.Generator().manual_seed(length))
    return tokens, tokens.roll(-1, 1), torch.ones(samples, length), None, torch.arange(length).expand(samples, -1)


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
    assert TOKENS.known(made).equal(expected[0]) and between.STEP_TOKENS.known(made).equal(expected[0])
    assert type(tokens + 1) is torch.Tensor and between.STEP_TOKENS.known(tokens + 1) is None
    assert between.STEP_TOKENS.known(made.clone()) is None
