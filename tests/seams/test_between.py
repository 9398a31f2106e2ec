"""Between encoder and language model: upstream's results and gradients to the bit, without a read of the device."""

from collections import OrderedDict
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_block import Qwen3VLTransformerBlock
from megatron.core.packed_seq_params import PackedSeqParams
from torch.utils._python_dispatch import _disable_current_modes

import bridge_cg_plugin
from bridge_cg_plugin.graphs import host_copies
from bridge_cg_plugin.upstream.hooks import batches, between, early_reads, host_tokens, packed_rows
from bridge_cg_plugin.upstream.host_batch import GRIDS, KEPT, PACK_OFFSETS, TOKENS
from bridge_cg_plugin.upstream.seams.patches import bridge_release
from bridge_cg_plugin.upstream.seams.registry import seam
from bridge_cg_plugin.upstream.seams.seam import drift
from bridge_cg_plugin.upstream.seams.source_reader import SourceReader
from bridge_cg_plugin.vision.known_mask import KnownMask
from tests.unit import vlm
from tests.unit.waits import HostWait, no_host_waits

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


@pytest.fixture
def modelling(active):
    return active[between.PATCHES[0].seam.module]


def graphs_are(on, monkeypatch):
    for module in (batches, between, early_reads, host_tokens):
        monkeypatch.setattr(module, "any_on_graphs", lambda: on)


@pytest.fixture(autouse=True)
def graphs_wanted(monkeypatch):
    graphs_are(True, monkeypatch)


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


def test_a_mask_that_the_host_does_not_know_is_split_by_upstream(modelling):
    mask = torch.tensor([[True, False, True, True]])
    part, _ = modelling.split_deepstack_embs(mask, [torch.zeros(3, 2)], **SIZES[0])
    assert type(part) is torch.Tensor and part.tolist() == [[True, False]]


ROPE = (2, IMAGE, VIDEO, START)


def grids_of(call):
    return {name: call[name] for name in between.GRID_NAMES if name in call}


def pack(samples, length, device="cpu"):
    host = torch.arange(samples + 1, dtype=torch.int32) * length
    offsets = host.to(device)
    PACK_OFFSETS.remember(offsets, host)
    return PackedSeqParams("thd", offsets, offsets, offsets, offsets, max_seqlen_q=length, max_seqlen_kv=length)


@pytest.fixture
def uploaded(monkeypatch):
    """What went to the device, in order."""
    found = []
    monkeypatch.setattr(between, "on_device", lambda host, device: found.append((host, device.type)) or host.to(device))
    return found


@pytest.mark.parametrize("form", ["unpacked", "flat", "one sample"])
@every_batch_with_images
def test_positions_are_upstreams_and_need_no_device(modelling, samples, form, uploaded):
    call = make(samples[:1] if form == "one sample" else samples)
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


@contextmanager
def patched(on):
    (bridge_cg_plugin.activate if on else bridge_cg_plugin.deactivate)()
    try:
        yield
    finally:
        bridge_cg_plugin.activate()


def groups(tensor=1, context=1, rank=0):
    of = SimpleNamespace
    return of(tp=of(size=lambda: tensor), cp=of(size=lambda: context, rank=lambda: rank))


LAYOUTS = [groups(), groups(2), *(groups(context=2, rank=r) for r in range(2)), groups(2, 2, 1)]
LAYOUT_NAMES = ["one rank", "tensor", "context, first", "context, last", "both"]
every_layout = pytest.mark.parametrize("ranks", LAYOUTS, ids=LAYOUT_NAMES)


@every_layout
@pytest.mark.parametrize("width", [(), (3,)], ids=str)
def test_batches_are_packed_as_upstream_packs_them(modelling, ranks, width):
    new, old = modelling.preprocess_packed_seqs, modelling.preprocess_packed_seqs.__wrapped__
    given = [torch.randn(3, 16, *width, requires_grad=True) for _ in range(2)]
    given[1].data.copy_(given[0].data)
    mask = torch.ones(3, 16, dtype=torch.bool)
    expected, params = old(given[0], mask, True, ranks)
    with no_host_waits():
        found, described = new(given[1], mask, True, ranks)
    assert found.equal(expected)
    for packed in (found, expected):
        (packed * torch.arange(packed.numel()).view_as(packed)).sum().backward()
    assert given[1].grad.equal(given[0].grad)
    for name, value in vars(params).items():
        assert same(getattr(described, name), value) or getattr(described, name) == value


MASKS = {
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
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("width", [(), (3,)], ids=str)
def test_padded_batches_are_packed_as_upstream_packs_them(modelling, ranks, name, width):
    new, old = modelling.preprocess_packed_seqs, modelling.preprocess_packed_seqs.__wrapped__
    mask = mask_of(name)
    values = torch.randn(*mask.shape, *width)
    given = [values.clone().requires_grad_() for _ in range(2)]
    (expected, params), (found, described) = old(given[0], mask, True, ranks), new(given[1], mask, True, ranks)
    assert found.equal(expected) and vars(described).keys() == vars(params).keys()
    for packed in (found, expected):
        (packed * torch.arange(packed.numel()).view_as(packed)).sum().backward()
    assert given[1].grad.equal(given[0].grad)
    for field, value in vars(params).items():
        assert same(getattr(described, field), value) or getattr(described, field) == value
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


def test_a_mask_of_another_shape_is_refused_as_upstream_refuses_it(modelling):
    mask = torch.arange(16)[None] < torch.tensor([4, 5])[:, None]
    for packing in (modelling.preprocess_packed_seqs, modelling.preprocess_packed_seqs.__wrapped__):
        with pytest.raises(IndexError, match="does not match the shape"):
            packing(torch.zeros(2, 12), mask, True, groups())


def test_a_row_that_upstream_takes_several_times_is_its_own(modelling):
    mask = torch.arange(16)[None] < torch.tensor([16, 5])[:, None]
    ranks = groups(4, 2, 1)
    assert packed_rows.packed_rows(modelling.preprocess_packed_seqs.__wrapped__, mask, mask, ranks) is None
    given = [torch.randn(2, 16, generator=torch.Generator().manual_seed(0), requires_grad=True) for _ in range(2)]
    for packing, values in zip(
        (modelling.preprocess_packed_seqs, modelling.preprocess_packed_seqs.__wrapped__), given, strict=True
    ):
        packed = packing(values, mask, True, ranks)[0]
        (packed * torch.arange(packed.numel()).view_as(packed)).sum().backward()
    assert given[0].grad.equal(given[1].grad)


def test_rows_that_inference_made_are_made_anew_for_training(modelling, on_a_device):
    mask, values = mask_of("padding behind"), torch.randn(2, 16, requires_grad=True)
    KEPT.remember(mask, mask)
    with torch.inference_mode():
        modelling.preprocess_packed_seqs(values, mask, True, groups(2))
    modelling.preprocess_packed_seqs(values, mask, True, groups(2))[0].sum().backward()
    assert values.grad.equal(mask.float())


@every_layout
@pytest.mark.parametrize("name", MASKS)
def test_a_padded_batch_that_the_host_knows_is_packed_without_the_device(modelling, ranks, name):
    host, old = mask_of(name), modelling.preprocess_packed_seqs.__wrapped__
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
    for known in (TOKENS, host_tokens.STEP_TOKENS):
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


@pytest.fixture
def model(active):
    with vlm.on_cpu():
        return vlm.build(graphs=False)


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


@pytest.fixture
def on_a_device(monkeypatch):
    """Take every tensor for the device's, of which the host knows what it was told or has read."""
    monkeypatch.setattr(host_copies, "on_host", lambda tensor: False)
    for copies in (TOKENS, GRIDS, PACK_OFFSETS, KEPT, packed_rows._ROWS):
        monkeypatch.setattr(copies, "_known", OrderedDict())

    def computed_on_host(*args):
        with _disable_current_modes():
            return packed_rows.packed_rows(*args)

    monkeypatch.setattr(between, "packed_rows", computed_on_host)


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
    reads = early_reads.EarlyReads(model)
    found = padded(model, call, lengths, no_host_waits())
    reads.remove()
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
    assert not KEPT._known and not packed_rows._ROWS._known  # a loop may write to its tensors by any means
    with pytest.raises(HostWait):
        padded(model, make(samples, seed=1), lengths, no_host_waits())


def test_what_was_read_is_forgotten_and_read_anew(on_a_device):
    call = make(BATCHES["one image"])
    tokens = call["input_ids"]
    for _ in range(2):
        tokens.data[0, 0] += 1  # which PyTorch does not count
        forget = early_reads.read_ahead(call)
        assert TOKENS.known(tokens).equal(tokens)
        for each in forget:
            each()
        assert TOKENS.known(tokens) is None


@pytest.mark.parametrize("change", ["graphs", "samples", "images"])
def test_nothing_is_read_that_upstream_does_not_read(change, on_a_device, monkeypatch):
    call = {**make(BATCHES["one image"]), "attention_mask": None, "packed_seq_params": None}
    graphs_are(change != "graphs", monkeypatch)
    if change == "samples":
        call["input_ids"] = call["input_ids"][0]  # a pack of tokens
    if change == "images":
        call = {name: value for name, value in call.items() if "grid" not in name and "pixel" not in name}
    early_reads.EarlyReads(torch.nn.Module())._began(torch.nn.Module(), (), call)
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
    early_reads.EarlyReads(model)
    found = stepped(model, BATCHES[name], packed)
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
    assert asked and all(values is not None for values in asked)
