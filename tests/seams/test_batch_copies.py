"""Batches: copies beside computing without a race and as upstream makes them, and what the host keeps of them."""

import copy
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.bridge.models.qwen_vl import qwen3_vl_step
from megatron.bridge.training.utils.visual_inputs import GenericVisualInputs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data._utils.pin_memory import pin_memory

import bridge_cg_plugin
from bridge_cg_plugin.upstream.hooks import batches, between
from bridge_cg_plugin.upstream.hooks.batches import GRIDS, MAX_BATCHES_IN_FLIGHT, PATCHES, CopyStream

from .. import fake_streams

DEVICE = "meta"
KEYWORDS = {"is_first_pp_stage": True, "is_last_pp_stage": True}


class Event(fake_streams.Event):
    """Work that the host may wait for."""

    waiting: list["Event"]

    def __init__(self, blocking=False):
        super().__init__()

    def record(self, stream):
        super().record(stream)
        self.waiting.append(self)

    def synchronize(self):
        self.waiting.remove(self)


class Races(TorchDispatchMode):
    """Launches work on tensors of the device, and raises where a stream reads what may not be written yet.

    Attributes:
        written: On which stream each tensor's memory was written.
        used: The streams that the allocator was told of.
    """

    def __init__(self, device):
        super().__init__()
        self.written, self.used, self.device, self._kept = {}, {}, device, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.read((args, kwargs))
        for tensor in of_device(made):
            self._kept.append(tensor)  # no other gets its address
            self.written.setdefault(address(tensor), self.device.current)
            self.device.current.past.add(address(tensor))
        return made

    def read(self, tree):
        for tensor in of_device(tree):
            assert address(tensor) in self.device.current.past, "read before it was written"


def of_device(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.device.type == DEVICE]


def address(tensor):
    return tensor.untyped_storage()._cdata


@contextmanager
def device(graphs=True):
    """A device that computes nothing, its streams followed, the plugin's graphs on or off; yields what was seen."""
    Event.waiting = []
    fakes = {"Event": Event, "is_initialized": lambda: True, "is_current_stream_capturing": lambda: False}

    def used(tensor, stream):
        races.used.setdefault(address(tensor), set()).add(stream)

    with ExitStack() as stack:
        races = Races(stack.enter_context(fake_streams.fake_streams()))
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda self, **_: self.to(DEVICE)))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", used))
        stack.enter_context(mock.patch.object(batches, "COPIES", CopyStream()))
        for module in (batches, between):
            stack.enter_context(mock.patch.object(module, "any_on_graphs", lambda: graphs))
        stack.enter_context(races)
        yield races


@pytest.fixture(scope="module", autouse=True)
def patched(upstream):
    bridge_cg_plugin.activate()


TENSORS = st.sampled_from(["none", "host", "device"])
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
IMAGES = ("pixel_values", "image_grid_thw")
BATCHES = st.lists(
    st.fixed_dictionaries({**dict.fromkeys(FIELDS, TENSORS), "images": st.tuples(TENSORS, TENSORS) | st.none()}),
    max_size=6,
)


def made(kinds, number):
    """Return a batch of these kinds of tensors, marked with its number."""

    def tensor(kind):
        host = torch.full((2, 4), number)
        return None if kind == "none" else host.to(DEVICE) if kind == "device" else host

    batch = {name: tensor(kinds[name]) for name in FIELDS}
    if kinds["images"] is not None:
        batch["visual_inputs"] = GenericVisualInputs(**dict(zip(IMAGES, map(tensor, kinds["images"]), strict=True)))
    return batch


def source(kinds, seen, streams):
    """Yield batches as a data set in this process makes them; notes on which stream each was made."""
    for number, each in enumerate(kinds):
        seen.append(streams.current)
        yield made(each, number)


def tensors_of(batch):
    visual = batch.get("visual_inputs")
    found = {**batch, **(vars(visual) if visual is not None else {})}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def described(batch):
    return {name: (value.device.type, value.dtype, value.shape) for name, value in tensors_of(batch).items()}


def copied(kinds, graphs):
    """Copy batches without a race and in order; returns how each lies on the device."""
    found, fetched = [], []
    with device(graphs) as seen:
        computing = seen.device.current
        data = source(kinds, fetched, seen.device)
        for number in range(len(kinds)):
            batch = qwen3_vl_step.get_batch_from_iterator(data, **KEYWORDS)
            assert len(fetched) == number + 1, "a batch was fetched ahead"
            assert seen.device.current is computing
            seen.read(tensors_of(batch))
            assert len(Event.waiting) <= MAX_BATCHES_IN_FLIGHT
            for tensor in tensors_of(batch).values():
                assert seen.written[address(tensor)] is computing or computing in seen.used[address(tensor)]
            found.append(described(batch))
        with pytest.raises(StopIteration):
            qwen3_vl_step.get_batch_from_iterator(data, **KEYWORDS)
        assert fetched == [computing] * len(kinds)
        assert graphs or not seen.used and not Event.waiting
    return found


@given(kinds=BATCHES)
def test_any_batches_are_upstreams_copied_without_a_race_and_in_order(kinds):
    assert copied(kinds, graphs=True) == copied(kinds, graphs=False)


def test_the_computing_stream_waits_for_copies_that_an_error_ends():
    with device() as seen:
        before = torch.zeros(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="no more"), batches.COPIES.copying():
            made_there = before + 1
            raise RuntimeError("no more")
        seen.read(made_there)


@pytest.fixture
def locked(monkeypatch):
    """Page-locked tensors by their addresses, as this machine has no such memory."""
    found = set()

    def lock(tensor):
        copied = tensor.clone()
        found.add(copied.data_ptr())
        return copied

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    monkeypatch.setattr(batches, "any_on_graphs", lambda: True)
    return found


@pytest.mark.parametrize("fields", [(), ("pixel_values",), IMAGES, ("pixel_values_videos", "video_grid_thw")], ids=str)
def test_a_data_loader_page_locks_images(locked, fields):
    given = {name: torch.randn(2, 3) for name in fields}
    batch = {"tokens": torch.arange(4), "visual_inputs": GenericVisualInputs(**given)}
    before = copy.copy(batch["visual_inputs"])
    found = pin_memory(batch)["visual_inputs"]
    assert type(found) is GenericVisualInputs and found is not batch["visual_inputs"]
    assert batch["visual_inputs"].__dict__.keys() == before.__dict__.keys()
    for name, value in vars(before).items():
        assert vars(batch["visual_inputs"])[name] is value  # the loader's own stay as they are
        assert getattr(found, name) is value is None or getattr(found, name).equal(value)
    assert all(getattr(found, name).data_ptr() in locked for name in fields)


def test_what_need_not_be_page_locked_stays_where_it_is(locked, monkeypatch):
    pixels = torch.zeros(2, device=DEVICE)
    assert pin_memory(GenericVisualInputs(pixel_values=pixels)).pixel_values is pixels and not locked
    monkeypatch.setattr(batches, "any_on_graphs", lambda: False)
    inputs = GenericVisualInputs(pixel_values=torch.zeros(2))
    assert pin_memory({"visual_inputs": inputs})["visual_inputs"] is inputs


GRID = torch.tensor([[[1, 4, 6], [3, 2, 8]]])
VIDEO = torch.tensor([[[5, 2, 2]]])


def batch(**visual):
    return {"tokens": torch.zeros(2, 4), "visual_inputs": GenericVisualInputs(**visual)}


def fake_step(device="meta"):
    """What Bridge's step does to a batch, with a device that this machine has."""

    def get_batch_from_iterator(data_iterator, use_mtp=False, *, is_first_pp_stage, is_last_pp_stage):
        """Get a batch."""
        found = next(data_iterator)
        visual = found["visual_inputs"]
        for name, value in (visual.__dict__ if visual is not None else {}).items():
            visual.__dict__[name] = value.to(device) if value is not None else None
        return {**found, "said": (use_mtp, is_first_pp_stage, is_last_pp_stage)}

    return get_batch_from_iterator


@pytest.mark.parametrize("patch", [p for p in PATCHES if p.name.startswith("host_")], ids=lambda p: p.name)
def test_the_wrapped_step_remembers_what_it_moved(patch):
    step = patch.make(fake_step())
    given = batch(image_grid_thw=GRID, video_grid_thw=VIDEO, image_sizes=torch.tensor([[56, 84], [28, 56]]))
    found = step(iter([given]), True, is_first_pp_stage=1, is_last_pp_stage=2)
    assert found["said"] == (True, 1, 2)
    visual = found["visual_inputs"]
    assert visual.image_grid_thw.device.type == "meta"
    flat = visual.normalized_for_model()
    before = GRIDS.device_reads
    assert GRIDS.lookup(flat["image_grid_thw"]) == ((1, 4, 6), (3, 2, 8))
    assert GRIDS.lookup(flat["video_grid_thw"]) == ((5, 2, 2),)
    assert GRIDS.values(flat["image_sizes"]) == (56, 84, 28, 56)  # of images that are padded
    assert GRIDS.device_reads == before
    assert step.__doc__ == "Get a batch." and step.__name__ == "get_batch_from_iterator"


def test_other_kinds_of_visual_inputs_pass():
    step = PATCHES[0].make(lambda data_iterator: next(data_iterator))
    item = {"visual_inputs": SimpleNamespace(pixels=1)}
    assert step(iter([item])) is item
