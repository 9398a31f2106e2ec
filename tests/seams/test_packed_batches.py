"""Padded batches are packed as upstream packs them, to the bit and without a read of the device."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bridge_cg_plugin.upstream.hooks import between
from bridge_cg_plugin.upstream.hooks.batches import KEPT, TOKENS
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


MASKS = {
    "no padding": [16, 16, 16],
    "padding behind": [16, 11],
    "padding that leaves uneven lengths": [13, 7, 6],
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
        assert same(getattr(described, field), value) or getattr(described, field) == value
    # As between two ranks' between, whose layout is another one.
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
def test_a_padded_batch_that_the_host_knows_is_packed_without_the_device(modelling, ranks):
    host, old = mask_of("padding that leaves uneven lengths"), modelling.preprocess_packed_seqs.__wrapped__
    ids = torch.arange(host.numel()).view(host.shape)
    tokens, mask = ids.to("meta"), host.to("meta")
    TOKENS.remember(tokens, ids)
    KEPT.remember(mask, host)
    for _ in range(2):
        packed = modelling.preprocess_packed_seqs(tokens, mask, True, ranks)[0]
        assert TOKENS.known(packed).equal(old(ids, host, True, ranks)[0])
    features = torch.zeros(*host.shape, 3, device="meta")
    assert modelling.preprocess_packed_seqs(features, mask, True, ranks)[0].shape == (*packed.shape, 3)


@every_layout
def test_a_batch_of_the_step_is_packed_without_the_device(modelling, ranks):
    host = make(BATCHES["a text-only sample"])["input_ids"]
    tokens, mask = host.to("meta"), torch.ones(host.shape, dtype=torch.bool, device="meta")
    for known in (TOKENS, between.STEP_TOKENS):
        known.remember(tokens, host)
    packed = modelling.preprocess_packed_seqs(tokens, mask, True, ranks)[0]
    expected = modelling.preprocess_packed_seqs.__wrapped__(host, torch.ones_like(host).bool(), True, ranks)[0]
    assert TOKENS.known(packed).equal(expected)
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
