"""Batches of Qwen3-VL's, and its forward without layers, for tests of what lies between encoder and language model."""

from collections import OrderedDict
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_block import Qwen3VLTransformerBlock
from megatron.core.packed_seq_params import PackedSeqParams
from torch.utils._python_dispatch import _disable_current_modes

import bridge_cg_plugin
from bridge_cg_plugin.graphs import host_copies
from bridge_cg_plugin.upstream.hooks import batches, between
from bridge_cg_plugin.upstream.hooks.batches import GRIDS, KEPT, PACK_OFFSETS, TOKENS
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.registry import seam
from tests.unit import vlm

IMAGE, VIDEO, START = vlm.IMAGE, vlm.VIDEO, vlm.START
NEWEST_STEP = seam("step_padding").expected_in(bridge_release())
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


def graphs_are(on, monkeypatch):
    for module in (batches, between):
        monkeypatch.setattr(module, "any_on_graphs", lambda: on)


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
    return found is expected or (not isinstance(found, torch.Tensor) and found == expected)


def pack(samples, length, device="cpu"):
    host = torch.arange(samples + 1, dtype=torch.int32) * length
    offsets = host.to(device)
    PACK_OFFSETS.remember(offsets, host)
    return PackedSeqParams("thd", offsets, offsets, offsets, offsets, max_seqlen_q=length, max_seqlen_kv=length)


@contextmanager
def patched(on):
    (bridge_cg_plugin.activate if on else bridge_cg_plugin.deactivate)()
    try:
        yield
    finally:
        bridge_cg_plugin.activate()


@contextmanager
def without_layers(model):
    """Let a model's forward run without layers in either half: features are pixels, the output is what layers get.

    Yields the other tensors that the language model gets.
    """
    got = []

    def encode(hidden_states, grid_thw):
        features = [hidden_states[::4, : vlm.HIDDEN] * (n + 1) for n in range(3)]
        return features[0], features[1:]

    def language_model(decoder_input, visual_pos_masks, deepstack_visual_embeds, **others):
        got.extend([visual_pos_masks, others["input_ids"], others["position_ids"]])
        hidden = decoder_input
        for features in deepstack_visual_embeds or ():
            hidden = Qwen3VLTransformerBlock._deepstack_process(None, hidden, visual_pos_masks, features)
        return hidden

    encoder = mock.patch.object(model.vision_model, "forward", encode)
    with vlm.on_cpu(), encoder, mock.patch.object(model.language_model, "forward", language_model):
        yield got


def gradients(model, hidden):
    """Return the output, and what its backward gives the embeddings."""
    model.zero_grad()
    (hidden * torch.arange(hidden.numel()).view_as(hidden)).sum().backward()
    return [hidden.detach(), model.language_model.embedding.word_embeddings.weight.grad]


def new_model():
    with vlm.on_cpu():
        return vlm.build(graphs=False)


def take_all_for_the_devices(monkeypatch):
    """Take every tensor for the device's, of which the host knows what it was told or has read."""
    monkeypatch.setattr(host_copies, "on_host", lambda tensor: False)
    for copies in (TOKENS, GRIDS, PACK_OFFSETS, KEPT, between._ROWS):
        monkeypatch.setattr(copies, "_known", OrderedDict())

    made = between.packed_rows

    def computed_on_host(*args):
        with _disable_current_modes():
            return made(*args)

    monkeypatch.setattr(between, "packed_rows", computed_on_host)
