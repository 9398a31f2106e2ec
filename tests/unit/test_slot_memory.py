"""Memory of a slot, which shrinks to what its recordings need, and never below."""

import pytest

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.memory.pools import SlotMemory
from bridge_cg_plugin.graphs.memory.ranges import DeviceMemoryError
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor

from ..pooled import PooledExecutor
from ..regions import new_region
from .test_region import Grudging
from .toy import Toy, ToyProgram, loss_of, toy_batch

LEAST_BYTES = 1024


def train(region, tokens, count):
    for _ in range(count):
        if (outputs := region.run(toy_batch(tokens))) is not None:
            loss_of(outputs).backward()


def needed(region):
    return max(made.nbytes for source in region.sources for made in source.recordings.values())


def test_another_states_recordings_keep_their_memory_where_activations_take_too_much():
    offloading, model = Grudging(refusals=0), Toy()
    region = new_region(ToyProgram(model), PooledExecutor(), [Bucket(4), Bucket(16)], offloading=offloading)
    region.capture()
    large = needed(region)
    for state in (1, 2):
        model.mix.state = state
        offloading.refusals = len(offloading.shown) + 1 if state == 2 else 0
        train(region, (2, 2), 4)
    assert region.slots[0].common.nbytes >= needed(region) == large


def test_a_microbatch_in_flight_keeps_its_memory_though_its_state_is_forgotten():
    model = Toy()
    region = new_region(ToyProgram(model), PooledExecutor(), [Bucket(4), Bucket(16)], slots=2)
    region.capture()
    large = needed(region)
    outputs = region.run(toy_batch((8, 8)))
    (slot,) = (slot for slot in region.slots if not slot.free)
    for state in range(1, 6):
        model.mix.state = state
        train(region, (2, 2), 5)
    del model.mix.state
    assert slot.common.nbytes >= large
    loss_of(outputs).backward()
    model.mix.state = 6
    train(region, (2, 2), 5)
    assert slot.free


class WithoutAddresses(SlotMemory):
    def begin(self):
        raise DeviceMemoryError("cuMemAddressReserve: CUDA_ERROR_OUT_OF_MEMORY")


def test_a_recording_without_addresses_fails_as_others_do(monkeypatch):
    monkeypatch.setattr(ReferenceExecutor, "new_memory", lambda executor: WithoutAddresses())
    region = new_region(ToyProgram(Toy()), ReferenceExecutor(), [Bucket(4)])
    with pytest.raises(CaptureError, match="bucket 4: cuMemAddressReserve"):
        region.capture()
    assert not region.slots
