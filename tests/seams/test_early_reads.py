"""What other loops give Qwen3-VL is read before the encoder, and forgotten when the forward returns."""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from bridge_cg_plugin.graphs import host_copies
from bridge_cg_plugin.upstream.hooks import between
from bridge_cg_plugin.upstream.hooks.batches import GRIDS, KEPT, PACK_OFFSETS, TOKENS
from tests.unit import vlm
from tests.unit.waits import HostWait, no_host_waits

from .qwen_batches import (
    BATCHES,
    NEWEST_STEP,
    WITH_IMAGES,
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


def padded(model, call, lengths, waits=None):
    """Return what the language model gets of a padded batch, and gradients.

    Args:
        model: The model.
        call: Tokens, pixels and grids.
        lengths: Of the samples.
        waits: Is entered when the encoder is called.
    """
    samples, length = call["input_ids"].shape
    mask = torch.arange(length)[None] < torch.tensor(lengths)[:, None]
    positions = torch.arange(3 * samples * length).view(3, samples, length)
    with ExitStack() as inside, without_layers(model) as got:
        encode = model.vision_model.forward

        def encoder(**kwargs):
            _ = waits is None or inside.enter_context(waits)
            return encode(**kwargs)

        inside.enter_context(mock.patch.object(model.vision_model, "forward", encoder))
        inside.enter_context(mock.patch.object(vlm.modelling, "get_rope_index", lambda *_, **__: (positions, None)))
        hidden = model(
            **{name: value.clone() for name, value in call.items()},
            attention_mask=mask,
            packed_seq_params=pack(samples, length),
        )
    return [*gradients(model, hidden), *got]


@pytest.mark.parametrize("samples", [s for n, s in WITH_IMAGES.items() if "and v" not in n])
def test_a_loop_without_host_copies_waits_before_its_encoder_alone(model, samples, on_a_device):
    """As verl's: tokens, mask and grids are on the device, and samples are padded to one length."""
    call, lengths = make(samples), [64 - 3 * number for number in range(len(samples))]
    with patched(False):
        expected = padded(model, call, lengths)
        with pytest.raises(HostWait):
            padded(model, call, lengths, no_host_waits())
    reads = between.EarlyReads(model)
    found = padded(model, call, lengths, no_host_waits())
    reads.remove()
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
    assert not KEPT._known and not between._ROWS._known  # a loop may write to its tensors by any means
    with pytest.raises(HostWait):
        padded(model, make(samples, seed=1), lengths, no_host_waits())


@pytest.mark.parametrize("change", ["graphs", "samples", "images"])
def test_nothing_is_read_that_upstream_does_not_read(change, on_a_device, monkeypatch):
    call = {**make(BATCHES["one image"]), "attention_mask": None, "packed_seq_params": None}
    graphs_are(change != "graphs", monkeypatch)
    if change == "samples":
        call["input_ids"] = call["input_ids"][0]  # a pack of tokens
    if change == "images":
        call = {name: value for name, value in call.items() if "grid" not in name and "pixel" not in name}
    between.EarlyReads(torch.nn.Module())._began(torch.nn.Module(), (), call)
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
    between.EarlyReads(model)
    found = stepped(model, BATCHES[name], packed)
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
    assert asked and all(values is not None for values in asked)
