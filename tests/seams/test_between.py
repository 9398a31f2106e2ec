"""Between encoder and language model: upstream's results and gradients to the bit, without a read of the device."""

from contextlib import contextmanager

import pytest
import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_block import Qwen3VLTransformerBlock

import bridge_cg_plugin
from bridge_cg_plugin.upstream.hooks import between, host_tokens
from bridge_cg_plugin.upstream.hooks.host_tokens import TOKENS
from bridge_cg_plugin.upstream.hooks.vision_helper import GRIDS
from bridge_cg_plugin.vision.known_mask import KnownMask
from tests.unit import vlm
from tests.unit.waits import HostWait, no_host_waits

IMAGE, VIDEO, START = vlm.IMAGE, vlm.VIDEO, vlm.START
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
# Of each sample: what stands in its text, as (token, frames, height, width) in patches.
BATCHES = {
    "one image": [[(IMAGE, 1, 4, 4)]],
    "images in several samples": [[(IMAGE, 1, 4, 4), (IMAGE, 1, 2, 6)], [(IMAGE, 1, 8, 2)]],
    "a text-only sample": [[(IMAGE, 1, 4, 4)], [], [(IMAGE, 1, 2, 2)]],
    "a video": [[(VIDEO, 2, 4, 4)], []],
    "images and videos": [[(IMAGE, 1, 4, 4), (VIDEO, 2, 2, 4)], [(VIDEO, 1, 2, 2), (IMAGE, 1, 2, 6)]],
    "no images": [[], []],
}
WITH_IMAGES = {name: samples for name, samples in BATCHES.items() if any(samples)}
every_batch = pytest.mark.parametrize("samples", BATCHES.values(), ids=BATCHES)
every_batch_with_images = pytest.mark.parametrize("samples", WITH_IMAGES.values(), ids=WITH_IMAGES)


@pytest.fixture
def modelling(active):
    return active[between.PATCHES[0].seam.module]


@pytest.fixture(autouse=True)
def graphs_wanted(monkeypatch):
    monkeypatch.setattr(host_tokens, "active_helpers", lambda: [object()])


def make(samples, length=64, seed=0):
    """Return what Bridge's step gives its model of these samples, their ends padded."""
    generator = torch.Generator().manual_seed(seed)
    rows, grids = [], {IMAGE: [], VIDEO: []}
    for seen in samples:
        row = torch.randint(1, 60, (4,), generator=generator).tolist()
        for token, frames, height, width in seen:
            row += sum(([START, *[token] * (height * width // 4), 3] for _ in range(frames)), [])
            grids[token].append((frames, height, width))
        rows.append([*row, *[0] * (length - len(row))])
    call = {"input_ids": torch.tensor(rows)}
    for token, grid, pixels in (
        (IMAGE, "image_grid_thw", "pixel_values"),
        (VIDEO, "video_grid_thw", "pixel_values_videos"),
    ):
        if grids[token]:
            call[grid] = torch.tensor(grids[token])
            call[pixels] = torch.randn(int(call[grid].prod(1).sum()), vlm.PATCH, generator=generator)
    return call


def same(found, expected):
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and found.equal(expected)
    return found is expected


def elsewhere(call):
    """Return a call's tokens and grids on a device that cannot be read, with what the host knows of them."""
    moved = dict(call)
    for name, known in (("input_ids", TOKENS), ("image_grid_thw", GRIDS), ("video_grid_thw", GRIDS)):
        if name in call:
            moved[name] = call[name].to("meta")
            known.remember(moved[name], call[name])
    return moved


@every_batch
def test_images_are_found_as_upstream_finds_them(modelling, samples):
    call = make(samples)
    new, old = modelling.reorganize_inputs, modelling.reorganize_inputs.__wrapped__
    expected, found = old(**call, **IDS), new(**call, **IDS)
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
    assert expected[2] is None or isinstance(found[2], KnownMask)


@every_batch
def test_images_are_found_without_the_device(modelling, samples):
    call = make(samples)
    values, grid, mask = modelling.reorganize_inputs.__wrapped__(**call, **IDS)
    moved = elsewhere(call)
    found = modelling.reorganize_inputs(**moved, **IDS)
    assert same(found[0], values)
    if mask is not None:
        assert found[2].device.type == "meta" and found[2].host.equal(mask)
        assert found[1].device.type == "meta" and GRIDS.lookup(found[1]) == tuple(map(tuple, grid.tolist()))


@pytest.mark.parametrize("unknown", ["input_ids", "image_grid_thw"])
def test_what_the_host_does_not_know_is_upstreams(modelling, unknown):
    call = make(BATCHES["images in several samples"])
    moved = {**elsewhere(call), unknown: call[unknown].to("meta")}
    mask = modelling.reorganize_inputs(**moved, **IDS)[2]
    assert type(mask) is torch.Tensor and mask.device.type == "meta"


def test_masks_that_the_data_set_made_are_kept(modelling):
    call = make(BATCHES["one image"])
    mask = call["input_ids"] == IMAGE
    assert modelling.reorganize_inputs(**call, **IDS, image_input_mask=mask)[2] is mask


def test_without_graphs_images_are_found_by_upstream(modelling, monkeypatch):
    monkeypatch.setattr(host_tokens, "active_helpers", lambda: [])
    assert type(modelling.reorganize_inputs(**make(BATCHES["one image"]), **IDS)[2]) is torch.Tensor


SIZES = [
    *({"tp_size": 2, "tp_rank": rank, "sequence_parallel": True} for rank in range(2)),
    *({"cp_size": 2, "cp_rank": rank} for rank in range(2)),
    {"tp_size": 2, "tp_rank": 1, "cp_size": 2, "cp_rank": 1, "sequence_parallel": True},
    {},
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@every_batch_with_images
def test_ranks_have_upstreams_part_of_the_features(modelling, samples, sizes):
    mask = modelling.reorganize_inputs.__wrapped__(**make(samples), **IDS)[2]
    features = [torch.randn(int(mask.sum()), 3, requires_grad=True) for _ in range(2)]
    expected = modelling.split_deepstack_embs.__wrapped__(mask, features, **sizes)
    far = KnownMask(mask.to("meta"), mask)
    part, found = modelling.split_deepstack_embs(far, features, **sizes)
    assert isinstance(part, KnownMask) and part.device.type == "meta" and part.host.equal(expected[0])
    assert all(same(*pair) for pair in zip(found, expected[1], strict=True))
    assert modelling.split_deepstack_embs(None, None, **sizes) == (None, None)


def test_a_mask_that_the_host_does_not_know_is_split_by_upstream(modelling):
    mask = torch.tensor([[True, False, True, True]])
    part, _ = modelling.split_deepstack_embs(mask, [torch.zeros(3, 2)], **SIZES[0])
    assert type(part) is torch.Tensor and part.tolist() == [[True, False]]


@contextmanager
def patched(on):
    (bridge_cg_plugin.activate if on else bridge_cg_plugin.deactivate)()
    try:
        yield
    finally:
        bridge_cg_plugin.activate()


def trained(samples, **changes):
    """Run the whole model forward and backward; return its losses and every gradient."""
    with vlm.on_cpu():
        model = vlm.build(graphs=False, **changes)
        call = make(samples, length=vlm.SEQUENCE)
        losses = model(**call, labels=call["input_ids"].roll(-1, 1))
        losses.sum().backward()
    return losses.detach(), {name: p.grad for name, p in model.named_parameters()}


def equal(found, expected):
    same_gradients = all(
        grad is None if found[1][name] is None else found[1][name].equal(grad) for name, grad in expected[1].items()
    )
    return found[0].equal(expected[0]) and same_gradients


@every_batch
def test_losses_and_every_gradient_are_upstreams(active, samples):
    with patched(False):
        expected = trained(samples)
    assert equal(trained(samples), expected)


def placed(mask, call):
    """Put features into their places as the model's forward does, then add others as its first layers do."""
    torch.manual_seed(1)
    patches = sum(pixels.shape[0] for name, pixels in call.items() if name.startswith("pixel_values"))
    tokens = torch.randn(*call["input_ids"].shape, 3, requires_grad=True)
    rows = [torch.randn(patches // 4, 3, requires_grad=True) for _ in range(2)]
    embedded = tokens.clone()
    embedded[mask] = rows[0]
    added = Qwen3VLTransformerBlock._deepstack_process(None, embedded.transpose(0, 1).contiguous(), mask, rows[1])
    (added * torch.arange(added.numel()).view_as(added)).sum().backward()
    return [added.detach(), tokens.grad, *(row.grad for row in rows)]


@every_batch_with_images
def test_features_are_placed_and_added_without_a_wait(modelling, samples):
    call = make(samples)
    plain = modelling.reorganize_inputs.__wrapped__(**call, **IDS)[2]
    expected = placed(plain, call)
    known = modelling.reorganize_inputs(**call, **IDS)[2]
    with no_host_waits():
        found = placed(known, call)
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
    with no_host_waits(), pytest.raises(HostWait):
        placed(plain, call)
