"""Memory of a slot, which shrinks to what its recordings need, and never below."""

import pytest

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.memory.pools import Pool, SlotMemory
from bridge_cg_plugin.graphs.memory.virtual_memory import DeviceMemoryError
from bridge_cg_plugin.graphs.planning.buckets import Bucket
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor

from ..regions import new_region
from .test_region import Grudging
from .toy import Toy, ToyProgram, loss_of, toy_batch

LEAST_BYTES = 1024


class Marked:
    """Memory with a high-water mark; asks its executor what a recording takes."""

    shrinks = True

    def __init__(self, executor):
        self.executor, self.nbytes = executor, 0

    def begin(self):
        return Taken(self)

    def keep(self, nbytes):
        self.nbytes = min(self.nbytes, nbytes)


class Taken(Pool):
    def __init__(self, memory):
        self._memory = memory

    def settle(self):
        taken = self._memory.executor.taken()
        self._memory.nbytes = max(self._memory.nbytes, taken)
        return taken


class ByTokens(ReferenceExecutor):
    """A recording takes a hundred bytes a token."""

    tokens = 0

    def new_memory(self):
        return Marked(self)

    def record_forward(self, body, pool):
        self.tokens = body.bucket.tokens
        return super().record_forward(body, pool)

    def taken(self):
        return 100 * self.tokens


def train(region, tokens, count):
    for _ in range(count):
        if (outputs := region.run(toy_batch(tokens))) is not None:
            loss_of(outputs).backward()


def needed(region):
    return max(made.nbytes for source in region.sources for made in source.recordings.values())


def test_another_states_recordings_keep_their_memory_where_activations_take_too_much():
    offloading, model = Grudging(refusals=0), Toy()
    region = new_region(ToyProgram(model), ByTokens(), [Bucket(4), Bucket(16)], offloading=offloading)
    region.capture()
    for state in (1, 2):
        model.mix.state = state
        offloading.refusals = len(offloading.shown) + 1 if state == 2 else 0
        train(region, (2, 2), 4)
    assert region._slots[0].common.nbytes >= needed(region) == 1600


def test_a_microbatch_in_flight_keeps_its_memory_though_its_state_is_forgotten():
    model = Toy()
    region = new_region(ToyProgram(model), ByTokens(), [Bucket(4), Bucket(16)], slots=2)
    region.capture()
    outputs = region.run(toy_batch((8, 8)))
    (slot,) = (slot for slot in region._slots if not slot.free)
    for state in range(1, 6):
        model.mix.state = state
        train(region, (2, 2), 5)
    del model.mix.state
    assert slot.common.nbytes >= 1600
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
    assert not region.captured
