"""A region: batches, evaluations and schedules equal eager; its slots, their memory, and what is refused."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.errors import CaptureError, ReplayError
from bridge_cg_plugin.graphs.memory.pools import SlotMemory
from bridge_cg_plugin.graphs.memory.ranges import DeviceMemoryError
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.graphs.recordings.recording import STAY
from bridge_cg_plugin.graphs.replays.slot import StaticTensors

from ..pooled import PooledExecutor
from ..regions import new_region
from ..rows_program import RowsProgram
from ..tape import TapeExecutor
from .toy import (
    Toy,
    ToyProgram,
    assert_equals_eager,
    assert_same,
    eager_results,
    evaluation,
    loss_of,
    no_memory,
    poison,
    toy_batch,
    toy_region,
)

LENGTHS = st.lists(st.integers(1, 3).map(lambda n: 2 * n), min_size=1, max_size=4).filter(lambda n: sum(n) <= 16)


@settings(max_examples=30)
@given(st.lists(st.tuples(LENGTHS, st.booleans()), min_size=1, max_size=6))
def test_any_sequence_of_batches_equals_eager(sequence):
    """Whatever static memory held before."""
    region = toy_region(slots=2)
    for seed, (lengths, trains) in enumerate(sequence):
        batch = toy_batch(lengths, seed)
        poison(region, (float("nan"), 1e30)[seed % 2])
        if trains:
            assert_equals_eager(region, batch)
            continue
        with evaluation(region):
            outputs = region.run(batch) or region.run(batch)  # the first evaluation runs eager
        assert_same(outputs, region.program.model(batch.x, batch.offsets))
        assert sum(slot.free for slot in region.slots) == 2 and not any(output.requires_grad for output in outputs)


def test_what_pytorch_holds_goes_back_where_graphs_took_more_memory():
    """Before that, a step needed memory for an eager pass that it runs on graphs now."""

    class Growing(TapeExecutor):
        recorded, tidied = 0, ()

        def record_forward(self, body, pool):
            self.recorded += 1
            return super().record_forward(body, pool)

        def new_memory(self):
            executor = self

            class Memory(SlotMemory):
                nbytes = property(lambda self: (0, 2, 2, 4)[executor.recorded])

            return Memory()

        def tidy(self):
            self.tidied += (self.recorded,)

    executor = Growing()
    toy_region(executor=executor)
    assert executor.tidied == (0, 1, 3)  # behind whole warm-up passes, and where it grew


def test_passes_without_a_backward_get_a_slot_while_a_microbatch_waits_for_its_backward():
    """As a reference pass with the adapters off between a policy's forward and its backward."""
    region, batch = toy_region(), toy_batch((2, 4))
    held = region.run(batch)
    with evaluation(region):
        found = [region.run(batch) for _ in range(4)]
    assert held[0].requires_grad and found[0] is None and region.statistics.fallbacks == {"no_free_slot": 1}
    for outputs in found[1:]:
        assert_same(outputs, region.program.model(batch.x, batch.offsets))
    assert_same(
        torch.autograd.grad(loss_of(held), [*region.program.model.parameters(), batch.x]),
        eager_results(region.program.model, batch)[1],
    )


def test_no_memory_for_one_more_slot_is_no_error(monkeypatch):
    region, batch = toy_region(), toy_batch((2, 4))
    held = region.run(batch)
    monkeypatch.setattr(region.executor, "new_memory", no_memory)
    with torch.no_grad():
        assert not any(region.run(batch) for _ in range(3))
    assert region.statistics.fallbacks == {"no_free_slot": 2, "capture_failed": 1} and len(region.slots) == 1
    loss_of(held).backward()


def test_capture_fires_no_hook_of_a_parameter():
    model, fired = Toy(), []
    for parameter in model.parameters():
        parameter.register_hook(lambda g: fired.append("tensor"))
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    toy_region(model)
    assert fired == []


@pytest.mark.parametrize(("frozen", "modes"), [(False, {(True, True)}), (True, {(True, True), (False, True)})])
def test_each_recording_is_made_in_its_own_mode(frozen, modes):
    """A graph keeps the mode it was recorded in; the reference executor, which runs again, would hide another one."""
    model, seen = Toy().requires_grad_(not frozen), set()

    class Drop(nn.Dropout):
        def forward(self, x):
            seen.add((torch.is_grad_enabled(), self.training))
            return super().forward(x)

    model.drop = Drop(0.0)
    toy_region(model)
    assert seen == modes


@pytest.mark.parametrize(
    ("owner", "name", "error", "said"),
    [
        (StaticTensors, "view", torch.OutOfMemoryError("made to fail"), "made to fail"),
        (SlotMemory, "begin", DeviceMemoryError("cuMemAddressReserve: no"), "bucket 8: cuMemAddressReserve"),
    ],
)
def test_memory_that_runs_out_is_a_capture_error(monkeypatch, owner, name, error, said):
    region = new_region(ToyProgram(Toy()), ReferenceExecutor(), [Bucket(8)])

    def fail(*unused):
        raise error

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(CaptureError, match=said):
        region.capture()
    assert not region.slots


def test_reset_drops_everything():
    region = toy_region(slots=2)
    assert_equals_eager(region, toy_batch())
    held = [weakref.ref(made.recording) for made in region.sources.current.recordings.values()]
    held += [weakref.ref(slot.static) for slot in region.slots]
    gc.collect()
    gc.disable()  # recordings are not left to a collection
    try:
        region.reset()
        assert len(held) == 2 + 2 * 3 and not any(each() for each in held)
    finally:
        gc.enable()
    assert not region.slots and sum(slot.free for slot in region.slots) == 0
    assert not hasattr(region, "sources")
    assert region.run(toy_batch()) is None
    assert region.statistics.fallbacks == {"not_captured_yet": 1}


def test_a_recording_that_a_batch_asks_for_waits_for_parameters_first(monkeypatch):
    order = []
    region = toy_region(before_replay=lambda: order.append("wait"))
    record = region.executor.record_forward
    monkeypatch.setattr(region.executor, "record_forward", lambda *args: (order.append("record"), record(*args))[1])
    region.program.model.eval()
    region.run(toy_batch())
    assert order == [], "the mode may not last"
    region.run(toy_batch())
    assert order == ["wait", "record", "wait"]


def test_an_error_while_loading_gives_the_slot_back():
    region, batch = toy_region(), toy_batch((2, 4))
    broken = type(batch)(batch.x[:, :3], batch.offsets)
    with pytest.raises(RuntimeError):
        region.run(broken)
    assert sum(slot.free for slot in region.slots) == 1
    assert_equals_eager(region, batch)


@pytest.mark.parametrize("buckets, slots", [([], 1), ([Bucket(0)], 1), ([Bucket(4)], 0), ([Bucket(4)], -1)])
def test_impossible_regions_are_refused(buckets, slots):
    with pytest.raises(ValueError):
        new_region(ToyProgram(Toy()), ReferenceExecutor(), buckets, slots=slots)


class Grudging:
    """Offloads nothing and refuses the first slots that it is shown."""

    pinned_bytes = refusals = 0

    def __init__(self):
        self.shown = []

    def prepare(self, executor, bodies, slot):
        return [STAY] * len(bodies)

    def accepts(self, nbytes):
        self.shown.append(nbytes)
        return len(self.shown) > self.refusals

    def release(self):
        pass


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([True] * 3 + [False])), max_size=16), st.integers(1, 3))
def test_any_schedule_of_forwards_and_backwards_equals_eager(choices, slots):
    """A choice beyond the microbatches in flight is a forward, else the backward of that one, or its graph is freed."""
    region, flight, ended = toy_region(slots=slots), [], []
    for seed, (choice, ends) in enumerate(choices):
        if choice >= len(flight):
            batch = toy_batch([(2,), (2, 4), (8, 2), (4, 4, 4)][seed % 4], seed)
            outputs = region.run(batch)
            assert (outputs is None) == (len(flight) == slots)
            if outputs is not None:
                flight.append((batch, outputs))
            continue
        batch, outputs = flight.pop(choice)
        if not ends:
            del outputs
            continue
        expected = eager_results(region.program.model, batch)
        assert_same(outputs, expected[0])
        wanted = [*region.program.model.parameters(), batch.x]
        ended.append(([*outputs, *torch.autograd.grad(loss_of(outputs), wanted)], [*expected[0], *expected[1]]))
    for found, expected in ended:  # later replays of the slot leave them
        assert_same(found, expected)


def test_gradients_to_be_differentiated_are_refused():
    region = toy_region()
    with pytest.raises(ReplayError, match="create_graph"):
        loss_of(region.run(toy_batch())).backward(create_graph=True)


def test_a_late_second_backward_is_refused_and_harms_no_one():
    region, batch = toy_region(), toy_batch((4, 4), 5)
    expected = eager_results(region.program.model, batch)[1]
    stale = loss_of(region.run(toy_batch()))
    stale.backward(retain_graph=True)
    outputs = region.run(batch)
    with pytest.raises(ReplayError, match="ran twice"):
        stale.backward()
    wanted = [*region.program.model.parameters(), batch.x]
    assert_same(torch.autograd.grad(loss_of(outputs), wanted), expected)


def test_an_autograd_graph_that_outlives_its_backward_keeps_no_recording():
    region = toy_region()
    slot = weakref.ref(region.slots[0])
    kept = loss_of(region.run(toy_batch()))
    kept.backward()
    del region
    gc.collect()
    assert slot() is None


LEAST_BYTES = 1024


def train(region, tokens, count):
    for _ in range(count):
        if (outputs := region.run(toy_batch(tokens))) is not None:
            loss_of(outputs).backward()


def needed(region):
    return max(made.nbytes for source in region.sources for made in source.recordings.values())


def test_another_states_recordings_keep_their_memory_where_activations_take_too_much():
    offloading, model = Grudging(), Toy()
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


class Scaling(nn.Module):
    """Computes with twice its weights, which stand in for them during the pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, rows):
        twice = {name: 2 * parameter for name, parameter in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, twice, (rows,))


def test_a_pass_that_lets_others_stand_in_for_weights_leaves_the_models_own():
    model, rows = Scaling(), torch.randn(4, 4)
    own = list(model.parameters())
    region = new_region(RowsProgram(model, (4,)), ReferenceExecutor(), [Bucket(4), Bucket(8)])
    region.capture()
    assert all(now is before for now, before in zip(model.parameters(), own, strict=True))
    (outputs,) = region.run(rows)
    assert_same(torch.autograd.grad(outputs.sum(), own), torch.autograd.grad(model(rows).sum(), own))
