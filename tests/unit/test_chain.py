"""Parts of layers whose activations leave: they share a slot's memory and compute what parts that keep all compute."""

import gc
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bridge_cg_plugin.graphs.memory.pools import SlotMemory
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.offload.observe import other_bytes
from bridge_cg_plugin.offload.plan import Fate

from ..tape import tensors
from . import packs
from .packed_parts import APART, LARGE, SMALL, losses, new_model, on_parts, results, same
from .towers import assert_close, loss_of, move

LEAST_BYTES = 1024

MODULES = pytest.mark.parametrize("modules", [("attn",), ("mlp",)], ids=",".join)


def planned(graphs):
    """Return the plans of the largest bucket's parts with their inventories."""
    plans = graphs._regions[0]._piece.chain.offloading._plans
    return plans[max(plans)]


def bytes_of(parts):
    """Return what parts save in bytes."""
    return sum(inventory.nbytes for inventory, _ in parts)


def expected_of(model, modules, *lengths):
    """Return results of parts that keep all."""
    with on_parts(model, modules, APART):
        return [results(model, each) for each in lengths]


@pytest.mark.parametrize(
    "modules, layers, scopes",
    [
        (["attn"], {}, {"attention"}),
        (["attn", "mlp"], {}, {"attention", "mlp", "layernorm"}),
        (["attn", "moe_router"], packs.EXPERTS, {"attention", "layernorm"}),
    ],
    ids=["attn", "attn,mlp", "experts"],
)
def test_outputs_and_gradients_are_those_of_parts_that_keep_all(modules, layers, scopes):
    model = new_model(**layers)
    expected = expected_of(model, modules, SMALL, LARGE)
    with on_parts(model, modules, slots=2) as graphs:
        for _ in range(2):
            found = [results(model, lengths) for lengths in (SMALL, LARGE)]
            assert all(map(same, found, expected))
        statistics, parts = graphs.statistics(), planned(graphs)
        assert not statistics.fallbacks and statistics.replays == 4 * len(graphs._regions)
        assert statistics.pinned_bytes >= 2 * bytes_of(parts)
        assert len(parts) == len(graphs._regions)
        assert {fate for _, plan in parts for fate in plan.fates} == {Fate.OFFLOAD}
        assert scopes <= {seen.scope for inventory, _ in parts for seen in inventory.seen}
    assert graphs.statistics().pinned_bytes == 0


@MODULES
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "last"])
def test_microbatches_in_flight_keep_their_activations_apart(modules, order):
    model = new_model()

    def run():
        made = [loss_of([losses(model, lengths, seed)]) for seed, lengths in enumerate((LARGE, SMALL))]
        return [torch.autograd.grad(made[place], list(model.parameters())) for place in order]

    with on_parts(model, modules, APART, slots=2):
        expected = run()
    with on_parts(model, modules, slots=2) as graphs:
        for _ in range(2):
            for found, right in zip(run(), expected, strict=True):
                assert all(map(torch.equal, found, right))
        assert not graphs.statistics().fallbacks


def test_every_part_of_a_microbatch_has_the_same_slot():
    model = new_model()
    with on_parts(model, slots=2) as graphs:
        held = graphs._regions[1]._slots[0].take()
        made = losses(model, LARGE)
        assert [[slot.free for slot in region._slots] for region in graphs._regions] == [
            [region is not graphs._regions[1], False] for region in graphs._regions
        ]
        losses(model, SMALL)
        assert graphs.statistics().fallbacks == {"no_free_slot": 1}
        loss_of([made]).backward()
        held.release()
        losses(model, SMALL)
        assert graphs.statistics().replays == 2 * len(graphs._regions)


@MODULES
def test_passes_without_gradients_leave_activations_of_a_microbatch_alone(modules):
    model = new_model()
    ((_, expected),) = expected_of(model, modules, LARGE)
    with on_parts(model, modules, slots=2) as graphs:
        made = losses(model, LARGE)
        for _ in range(3):
            with torch.no_grad():
                losses(model, LARGE, 1)
        found = torch.autograd.grad(loss_of([made]), list(model.parameters()))
        assert all(map(torch.equal, found, expected))
        graphs.capture()
        model.eval()
        with torch.no_grad():
            losses(model, LARGE, 1)
        assert not graphs.statistics().fallbacks.keys() - {"mode_not_captured"}


@MODULES
@pytest.mark.parametrize("inference", [False, True])
def test_a_model_whose_memory_moved_has_all_parts_recorded_again(modules, inference):
    """What is recorded inside inference mode serves training later."""
    model = new_model()
    expected = expected_of(model, modules, LARGE)
    with on_parts(model, modules) as graphs:
        assert same(results(model, LARGE), expected[0])
        move(model.decoder.layers[1])
        before = [list(region.sources.current.recordings.values()) for region in graphs._regions]
        if inference:
            with torch.inference_mode():
                losses(model, LARGE)
        assert same(results(model, LARGE), expected[0])
        after = [list(region.sources.current.recordings.values()) for region in graphs._regions]
        assert not graphs.statistics().fallbacks.keys() - ({"mode_not_captured"} if inference else set())
        assert all(set(map(id, new)) - set(map(id, old)) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("moved", [False, True])
def test_a_microbatch_asks_once_for_a_state_of_its_parts(moved):
    """Ranks count alike, also where one of them has to record all parts again because its memory moved."""
    model = new_model()
    with on_parts(model) as graphs:
        results(model, LARGE)
        model.decoder.layers[2].requires_grad_(False)
        if moved:
            move(model.decoder.layers[0])
        for _ in range(3):
            results(model, LARGE)
        assert graphs.statistics().fallbacks == {"parameters_changed": 1}


@MODULES
def test_buckets_on_demand(modules):
    model = new_model()
    expected = expected_of(model, modules, LARGE, SMALL)
    with on_parts(model, modules, warmup=(SMALL,), slots=2, buckets="auto") as graphs:
        for _ in range(6):
            with graphs.step():
                made = [loss_of([losses(model, lengths)]) for lengths in (LARGE, SMALL)]
                found = [torch.autograd.grad(each, list(model.parameters())) for each in made]
        for gradients, (_, right) in zip(found, expected, strict=True):
            assert all(torch.allclose(a, b, atol=1e-5, rtol=1e-4) for a, b in zip(gradients, right, strict=True))
        buckets = {region.buckets for region in graphs._regions}
        assert len(buckets) == 1 and len({bucket.tokens for bucket in buckets.pop()}) == 2
        before = graphs.statistics().fallbacks.copy()
        results(model, LARGE)
        assert graphs.statistics().fallbacks == before


def test_memory_of_a_slot_is_that_of_the_largest_bucket_that_is_left():
    model = new_model()
    with on_parts(model, warmup=(SMALL,), buckets="auto") as graphs:
        while len(graphs._regions[0].buckets) == 1:
            with graphs.step():
                results(model, LARGE)
        taken, largest = graphs.statistics().graph_bytes, max(graphs._regions[0].buckets)
        for region in graphs._regions:
            region.drop(largest)
        assert graphs.statistics().graph_bytes < taken or not taken  # only some executors have memory
        assert len({id(region._slots[0].memory) for region in graphs._regions}) == 1


def test_memory_of_parts_is_given_back_without_a_collection():
    model = new_model()
    with on_parts(model) as graphs:
        results(model, LARGE)
        held = [weakref.ref(slot) for region in graphs._regions for slot in region._slots]
        held += [weakref.ref(graphs._regions[0]._piece.chain.common(0).border)]
        gc.disable()
        try:
            graphs.reset()
            assert [there for there in held if there() is not None] == []
        finally:
            gc.enable()


class Held(TorchDispatchMode):
    """What operations inside made; tells how much of it is still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in tensors((args, kwargs or {}))}
        for tensor in tensors(made):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return made

    @property
    def nbytes(self) -> int:
        gc.collect()
        return sum(size for there, size in self._made.values() if not there.expired())


class Measuring(ReferenceExecutor):
    """Looks at what a part's forward and backward leave in memory, as a graph's pool would hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.after_forward, self.after_backward = [], []

    def record_forward(self, body, pool):
        held = Held()
        with held:
            body.forward()
            body.join()
        self.after_forward.append(held.nbytes)
        return _Measured(body, held, self)

    record = None  # a chain records in two steps


class _Measured:
    def __init__(self, body, held, executor) -> None:
        self._body, self._held, self._executor = body, held, executor
        self.outputs = ()

    def record_backward(self) -> None:
        with self._held:
            self._body.backward()
        self._body.forget()
        self._executor.after_backward.append(self._held.nbytes)


def test_a_part_leaves_no_more_in_the_pool_than_its_plan_keeps():
    model, executor = new_model(), Measuring()
    with on_parts(model, executor=executor, buckets=[512]) as graphs:
        plans, parts = planned(graphs), len(graphs._regions)
        made = len(executor.after_forward)
    small = 4 * 1024 * parts  # what is below `LEAST_BYTES` stays
    assert made == len(executor.after_backward) and made % parts == 0
    assert all(left <= small for left in executor.after_forward)
    assert executor.after_backward == [0] * made
    assert plans[0].inventory.nbytes > 2 * small


def target_of(model, modules, share) -> float:
    """Return a target in GiB that so large a part of the activations fits."""
    with on_parts(model, modules, ("attention", "mlp")) as graphs:
        statistics = graphs.statistics()
        static = statistics.static_bytes + statistics.gradient_bytes
        return (share * bytes_of(planned(graphs)) + static) / 2**30


@MODULES
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_one_memory_target_holds_for_all_parts_of_a_slot(modules, share, capsys):
    model = new_model()
    expected = expected_of(model, modules, LARGE)
    target = target_of(model, modules, share)
    with on_parts(model, modules, None, executor=ReferenceExecutor(), offload_above_gb=target) as graphs:
        assert same(results(model, LARGE), expected[0])
        made = [region.sources.current.recordings.items() for region in graphs._regions]
        largest = max(graphs._regions[0].buckets)
        bodies = [r.recording._body for each in made for (_, b, mode), r in each if b == largest and mode.gradients]
        peaks = [body.activations.peak_of_last for body in bodies]
        plans = [plan for _, plan in planned(graphs)]
        assert any(peaks) and all(peak <= plan.window for peak, plan in zip(peaks, plans, strict=True))
        assert plans[0].window <= target * 2**30
        assert {fate for plan in plans for fate in plan.fates} == {Fate.KEEP, Fate.OFFLOAD}
    assert "GiB kept" in capsys.readouterr().out


def test_what_earlier_parts_leave_on_the_device_counts_for_later_ones():
    parts = [(50, 5), (20, 7), (30, 9)]
    assert (other_bytes(parts[:1]), other_bytes(parts), other_bytes([*parts, *parts])) == (50, 50, 21 + 50)


def test_small_and_marked_tensors_are_seen_to_stay():
    model = new_model()
    with on_parts(model, offload=None, offload_above_gb=1.0) as graphs:
        offloading = graphs._regions[0]._piece.chain.offloading
        assert all(observed.stays > 0 for parts in offloading._looked.values() for observed in parts)


class Gaps(ReferenceExecutor):
    """Its memory takes so much more than activations, as blocks leave gaps."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.recorded, self.parts = nbytes, 0, 3

    def record_forward(self, body, pool):
        self.recorded += body.activations is not None
        return super().record_forward(body, pool)

    def new_memory(self):
        executor = self

        class Memory(SlotMemory):
            @property
            def nbytes(self):
                return executor.taken()

        return Memory()

    def taken(self):
        return self.nbytes if self.recorded <= self.parts else 0


def test_a_slot_that_takes_more_than_its_target_has_all_parts_recorded_again():
    model = new_model()
    target = target_of(model, ("attn",), 0.8)
    executor = Gaps(int(1.05 * target * 2**30))
    settings = {"buckets": [512]}
    with on_parts(model, offload=None, executor=executor, offload_above_gb=target, **settings) as graphs:
        assert executor.recorded % len(graphs._regions) == 0 and executor.recorded > len(graphs._regions)
        results(model, LARGE)
        assert not graphs.statistics().fallbacks


class Failing(ReferenceExecutor):
    """Fails in its fourth recording, of the second slot."""

    recorded = 0

    def record_forward(self, body, pool):
        self.recorded += 1
        if self.recorded == 5:
            raise torch.OutOfMemoryError("made to fail")
        return super().record_forward(body, pool)


def test_a_failed_capture_leaves_the_model_eager_and_no_host_memory(caplog):
    model = new_model()
    expected = results(model, LARGE)
    with on_parts(model, capture=False, executor=Failing(), strict=False, slots=2) as graphs:
        assert not graphs.capture() and "OutOfMemory" in graphs.failure
        assert graphs.statistics().pinned_bytes == 0
        assert same(results(model, LARGE), expected)
    assert len([r for r in caplog.records if "could not be captured" in r.message]) == 1


def without_gradients(layer):
    """Let a layer run without gradients, on a copy, since megatron-core adds in place there."""
    run = layer.forward

    def forward(hidden_states, *args, **kwargs):
        with torch.no_grad():
            made, *others = run(hidden_states.detach().clone(), *args, **kwargs)
        return made.detach(), *others

    layer.forward = forward


def test_a_part_without_gradients_leaves_what_all_parts_read_alone():
    """What a pack is made of is written once a microbatch; a recording of one part in its midst would overwrite it."""
    right, model = new_model(layers=2), new_model(layers=2)
    for each in (right, model):
        without_gradients(each.decoder.layers[0])
    batch = packs.pack(SMALL)
    with on_parts(model, ["attn", "mlp"]) as graphs:
        for _ in range(4):
            made, expected = model(**batch), right(**batch)
            wanted = [list(each.decoder.layers[1].parameters()) for each in (model, right)]
            found = [torch.autograd.grad(each.sum(), own) for each, own in zip((made, expected), wanted, strict=True)]
            assert_close([made, *found[0]], [expected, *found[1]])
        assert graphs.statistics().replays == 4 * 2
