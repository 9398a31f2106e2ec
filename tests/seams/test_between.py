"""Between encoder and language model: upstream's results and gradients to the bit, without a read of the device."""

from contextlib import ExitStack, nullcontext
from unittest import mock

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from bridge_cg_plugin.graphs import host_copies
from bridge_cg_plugin.upstream.hooks import between
from bridge_cg_plugin.upstream.hooks.batches import GRIDS, KEPT, PACK_OFFSETS, TOKENS
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
    WITH_IMAGES,
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


def through(model, call, watch=None, packed=True, lengths=None):
    """Return what the language model gets of a batch, and the gradients of embeddings and pixels.

    Args:
        model: The model.
        call: Tokens, pixels and grids.
        watch: Is entered before the forward; where samples are padded, when the encoder is called.
        packed: Whether samples are packed.
        lengths: Of samples that are padded.
    """
    samples, length = call["input_ids"].shape
    call = {name: value.clone() for name, value in call.items()}
    pixels = [value.requires_grad_() for name, value in call.items() if name.startswith("pixel")]
    positions = torch.arange(3 * samples * length).view(3, samples, length)
    mask = torch.arange(length)[None] < torch.tensor(lengths or [length] * samples)[:, None]
    with ExitStack() as inside, without_layers(model) as got:
        encode = model.vision_model.forward

        def encoder(**kwargs):
            inside.enter_context(watch if watch and lengths else nullcontext())
            return encode(**kwargs)

        inside.enter_context(mock.patch.object(model.vision_model, "forward", encoder))
        inside.enter_context(mock.patch.object(vlm.modelling, "get_rope_index", lambda *_, **__: (positions, None)))
        inside.enter_context(watch if watch and not lengths else nullcontext())
        hidden = model(**call, attention_mask=mask, packed_seq_params=pack(samples, length) if packed else None)
        return [*gradients(model, hidden), *got, *(value.grad for value in pixels)]


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize(
    "samples", [s for n, s in BATCHES.items() if n != "images and videos"], ids=[n for n in BATCHES if "and v" not in n]
)
def test_the_forward_between_encoder_and_layers_does_not_wait(model, samples, packed):
    call = make(samples)
    with patched(False):
        expected = through(model, call, None, packed)
        if any(samples):
            with pytest.raises(HostWait):
                through(model, call, no_host_waits(), packed)
    found = through(model, call, no_host_waits(), packed)
    assert all(same(*pair) for pair in zip(found, expected, strict=True))


# What other loops give is read before the encoder, and forgotten when the forward returns.


@pytest.mark.parametrize("samples", [s for n, s in WITH_IMAGES.items() if "and v" not in n])
def test_a_loop_without_host_copies_waits_before_its_encoder_alone(model, samples, on_a_device):
    """As verl's: tokens, mask and grids are on the device, and samples are padded to one length."""
    call, lengths = make(samples), [64 - 3 * number for number in range(len(samples))]
    with patched(False):
        expected = through(model, call, lengths=lengths)
        with pytest.raises(HostWait):
            through(model, call, no_host_waits(), lengths=lengths)
    reads = between.early_reads(model)
    found = through(model, call, no_host_waits(), lengths=lengths)
    reads.close()
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
    assert not KEPT._known and not between._ROWS._known  # a loop may write to its tensors by any means
    with pytest.raises(HostWait):
        through(model, make(samples, seed=1), no_host_waits(), lengths=lengths)


@pytest.mark.parametrize("change", ["graphs", "samples", "images"])
def test_nothing_is_read_that_upstream_does_not_read(change, on_a_device, monkeypatch):
    call = {**make(BATCHES["one image"]), "attention_mask": None, "packed_seq_params": None}
    graphs_are(change != "graphs", monkeypatch)
    if change == "samples":
        call["input_ids"] = call["input_ids"][0]  # a pack of tokens
    if change == "images":
        call = {name: value for name, value in call.items() if "grid" not in name and "pixel" not in name}
    assert not between.read_ahead(call)
    assert not TOKENS._known and not GRIDS._known


def stepped(model, samples, packed):
    """Return what the language model gets of a batch that Bridge's step takes from its iterator, and gradients."""
    call = make(samples, length=50)  # the step pads it
    tokens = call.pop("input_ids")
    visual = vlm._Visual(**call) if call else None
    loss_mask = torch.ones(tokens.shape)
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": loss_mask, "visual_inputs": visual}
    state = vlm.state(graphs=False)
    state.cfg.dataset.enable_in_batch_packing = packed
    with without_layers(model) as got:
        hidden, _ = vlm.qwen3_vl_step.forward_step(state, iter([batch]), model)
        return [*gradients(model, hidden), *got]


@pytest.mark.skipif(not NEWEST_STEP, reason="this release's step is upstream's")
@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize("name", ["one image", "images in several samples", "a text-only sample", "no images"])
def test_the_host_knows_what_the_step_gives_its_model(model, name, packed, monkeypatch):
    with patched(False):
        expected = stepped(model, BATCHES[name], packed)
    asked = []
    for copies in (TOKENS, GRIDS, PACK_OFFSETS):
        known = copies.known
        monkeypatch.setattr(copies, "known", lambda tensor, known=known: asked.append(known(tensor)) or asked[-1])
    monkeypatch.setattr(host_copies, "on_host", lambda tensor: False)  # nothing is known that was not announced
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: pytest.fail("the device was read"))
    between.early_reads(model)
    found = stepped(model, BATCHES[name], packed)
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
    assert asked and all(values is not None for values in asked)
