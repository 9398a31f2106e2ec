"""Between encoder and language model: upstream's results and gradients to the bit, without a read of the device."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from bridge_cg_plugin.upstream.hooks import between
from bridge_cg_plugin.upstream.hooks.batches import GRIDS, TOKENS
from bridge_cg_plugin.vision.known_mask import KnownMask
from tests.unit import vlm
from tests.unit.waits import HostWait, no_host_waits

from .qwen_batches import (
    BATCHES,
    IDS,
    IMAGE,
    NEWEST_STEP,
    START,
    VIDEO,
    every_batch,
    every_batch_with_images,
    gradients,
    graphs_are,
    make,
    new_model,
    pack,
    patched,
    same,
    without_layers,
)

pytestmark = pytest.mark.usefixtures("graphs_wanted")


@pytest.fixture
def model(active):
    return new_model()


def elsewhere(call):
    """Return a call's tokens and grids on a device that cannot be read, with what the host knows of them."""
    moved = dict(call)
    for name, known in (("input_ids", TOKENS), ("image_grid_thw", GRIDS), ("video_grid_thw", GRIDS)):
        if name in call:
            moved[name] = call[name].to("meta")
            known.remember(moved[name], call[name])
    return moved


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


def test_without_graphs_images_are_found_by_upstream(modelling, monkeypatch):
    graphs_are(False, monkeypatch)
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


ROPE = (2, IMAGE, VIDEO, START)


def grids_of(call):
    return {name: call[name] for name in between.GRID_NAMES if name in call}


@pytest.fixture
def uploaded(monkeypatch):
    """What went to the device, in order."""
    found = []
    monkeypatch.setattr(between, "on_device", lambda host, device: found.append((host, device.type)) or host.to(device))
    return found


@pytest.mark.parametrize("form", ["unpacked", "flat"])
@every_batch_with_images
def test_positions_are_upstreams_and_need_no_device(modelling, samples, form, uploaded):
    call = make(samples)
    ids = call["input_ids"]
    packed = {"unpacked": lambda *_: None}.get(form, pack)
    if form == "flat":
        call["input_ids"] = ids.reshape(1, -1)
    if not grids_of(call) or (form == "flat" and not NEWEST_STEP):
        pytest.skip("nothing but text, or a form that came later")
    old = modelling.get_rope_index.__wrapped__
    expected = old(*ROPE, call["input_ids"], **grids_of(call), packed_seq_params=packed(*ids.shape))
    moved = elsewhere(call)
    params = packed(*ids.shape, "meta")
    found = modelling.get_rope_index(*ROPE, moved["input_ids"], **grids_of(moved), packed_seq_params=params)
    assert [values.device.type for values in found] == ["meta", "meta"]
    assert [device for _, device in uploaded] == ["meta", "meta"]
    assert all(same(host, values) for (host, _), values in zip(uploaded, expected, strict=True))
    on_cpu = modelling.get_rope_index(*ROPE, call["input_ids"], **grids_of(call), packed_seq_params=packed(*ids.shape))
    assert all(same(*pair) for pair in zip(on_cpu, expected, strict=True))


@pytest.mark.parametrize("unknown", ["input_ids", "image_grid_thw", "offsets", "padding"])
def test_positions_that_the_host_cannot_compute_are_upstreams(modelling, unknown, uploaded):
    call = make(BATCHES["images in several samples"])
    moved = elsewhere(call)
    others = {}
    if unknown == "offsets":
        offsets = torch.zeros(3, dtype=torch.int32, device="meta")
        others = {"packed_seq_params": PackedSeqParams("thd", offsets, offsets)}
    elif unknown == "padding":
        others = {"attention_mask": torch.ones_like(moved["input_ids"])}
    else:
        moved[unknown] = call[unknown].to("meta")
    with pytest.raises((NotImplementedError, RuntimeError)):  # upstream reads the device
        modelling.get_rope_index(*ROPE, moved["input_ids"], **grids_of(moved), **others)
    assert not uploaded


def test_positions_of_text_are_computed_where_they_are_needed(modelling, uploaded):
    tokens = torch.zeros(2, 5, dtype=torch.long)
    with no_host_waits():
        positions, _ = modelling.get_rope_index(*ROPE, tokens)
    assert not uploaded and positions[0].tolist() == [[0, 1, 2, 3, 4]] * 2


def through(model, call, packed, waits):
    """Return what the language model gets of a batch, and the gradients of embeddings and pixels."""
    samples, length = call["input_ids"].shape
    call = {name: value.clone() for name, value in call.items()}
    pixels = [value.requires_grad_() for name, value in call.items() if name.startswith("pixel")]
    positions = torch.arange(3 * samples * length).view(3, samples, length)
    on_host = mock.patch.object(vlm.modelling, "get_rope_index", lambda *_, **__: (positions, None))
    with without_layers(model) as got, on_host, nullcontext() if waits else no_host_waits():
        hidden = model(
            **call,
            attention_mask=torch.ones(samples, length, dtype=torch.bool),
            packed_seq_params=pack(samples, length) if packed else None,
        )
        return [*gradients(model, hidden), *got, *(value.grad for value in pixels)]


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize(
    "samples", [s for n, s in BATCHES.items() if n != "images and videos"], ids=[n for n in BATCHES if "and v" not in n]
)
def test_the_forward_between_encoder_and_layers_does_not_wait(model, samples, packed):
    call = make(samples)
    with patched(False):
        expected = through(model, call, packed, waits=True)
        if any(samples):
            with pytest.raises(HostWait):
                through(model, call, packed, waits=False)
    found = through(model, call, packed, waits=False)
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
