"""Parts of layers whose activations leave: they share a slot's memory and compute what parts that keep all compute."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.offload.inventory import Event, Inventory, Seen
from bridge_cg_plugin.offload.observe import Observed, observed_together
from bridge_cg_plugin.offload.planner import part_plans
from bridge_cg_plugin.offload.schedule import Fate
from bridge_cg_plugin.options import OFFLOAD_MODULES

from ..tape import tensors
from . import packs
from .towers import assert_close, draw, forward, graphs_on, loss_of, move, new_tower, results

ROWS, OTHERS = [(1, 8, 8), (2, 4, 8)], [(1, 4, 8)]
SETTINGS = {"buckets": (64, 128), "offload_min_bytes": 1024}
MODULES = pytest.mark.parametrize("modules", [("attn",), ("mlp",)], ids=",".join)


def planned(graphs):
    """Return the plan of the largest bucket's parts with their inventory."""
    plans = graphs._regions[0]._piece.chain.offloading._plans
    return plans[max(plans)]


def same(found, expected) -> bool:
    return all(map(torch.equal, found[0], expected[0])) and all(map(torch.equal, found[1], expected[1]))


@MODULES
@pytest.mark.both_executors
def test_outputs_and_gradients_are_those_of_parts_that_keep_all(modules):
    tower = new_tower()
    with graphs_on(tower, modules=modules, **SETTINGS):
        expected = [results(tower, rows) for rows in (ROWS, OTHERS)]
    with graphs_on(tower, modules=modules, slots=2, offload=OFFLOAD_MODULES, **SETTINGS) as graphs:
        for _ in range(2):
            assert all(same(results(tower, rows), right) for rows, right in zip((ROWS, OTHERS), expected, strict=True))
        plan, layers = planned(graphs), len(tower.decoder.layers)
        assert len(plan.inventory.parts) == layers
        assert plan.plan.places(Fate.OFFLOAD) == list(range(len(plan.inventory.seen)))
        statistics = graphs.statistics()
        assert not statistics.fallbacks and statistics.replays == 4 * layers
        assert statistics.pinned_bytes >= 2 * plan.inventory.nbytes
    assert graphs.statistics().pinned_bytes == 0


@MODULES
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "last"])
def test_microbatches_in_flight_keep_their_activations_apart(modules, order):
    tower = new_tower()
    wanted = [p for p in tower.parameters() if p.requires_grad]

    def run():
        losses = [loss_of(forward(tower, rows, seed)) for seed, rows in enumerate((ROWS, OTHERS))]
        return [torch.autograd.grad(losses[place], wanted) for place in order]

    with graphs_on(tower, modules=modules, slots=2, **SETTINGS):
        expected = run()
    with graphs_on(tower, modules=modules, slots=2, offload=OFFLOAD_MODULES, **SETTINGS) as graphs:
        for _ in range(2):
            for found, right in zip(run(), expected, strict=True):
                assert all(map(torch.equal, found, right))
        assert not graphs.statistics().fallbacks


@MODULES
def test_every_part_of_a_microbatch_has_the_same_slot(modules):
    tower = new_tower()
    with graphs_on(tower, modules=modules, slots=2, offload=OFFLOAD_MODULES, **SETTINGS) as graphs:
        held = graphs._regions[1]._slots[0].take()
        outputs = forward(tower, ROWS)
        assert [[slot.free for slot in region._slots] for region in graphs._regions] == [
            [region is not graphs._regions[1], False] for region in graphs._regions
        ]
        forward(tower, OTHERS)
        assert graphs.statistics().fallbacks == {"no_free_slot": len(graphs._regions)}
        loss_of(outputs).backward()
        held.release()
        forward(tower, OTHERS)
        assert graphs.statistics().replays == 2 * len(graphs._regions)


@MODULES
def test_a_pass_without_gradients_leaves_activations_of_a_microbatch_alone(modules):
    tower = new_tower()
    with graphs_on(tower, modules=modules, **SETTINGS):
        expected = results(tower, ROWS)
    with graphs_on(tower, modules=modules, slots=2, offload=OFFLOAD_MODULES, **SETTINGS) as graphs:
        outputs = forward(tower, ROWS)
        for _ in range(3):
            with torch.no_grad():
                tower(*draw(ROWS, 1))
        found = torch.autograd.grad(loss_of(outputs), [p for p in tower.parameters() if p.requires_grad])
        assert all(map(torch.equal, found, expected[1]))
        graphs.capture()
        tower.eval()
        with torch.no_grad():
            tower(*draw(ROWS, 1))
        assert not graphs.statistics().fallbacks.keys() - {"mode_not_captured"}


@MODULES
def test_a_model_whose_memory_moved_has_all_parts_recorded_again_before_its_next_microbatch(modules):
    tower = new_tower()
    with graphs_on(tower, modules=modules, **SETTINGS):
        expected = results(tower, ROWS)
    with graphs_on(tower, modules=modules, offload=OFFLOAD_MODULES, **SETTINGS) as graphs:
        assert same(results(tower, ROWS), expected)
        move(tower.decoder.layers[1])
        before = [list(region.sources.current.recordings.values()) for region in graphs._regions]
        assert same(results(tower, ROWS), expected)
        after = [list(region.sources.current.recordings.values()) for region in graphs._regions]
        assert not graphs.statistics().fallbacks
        assert all(set(map(id, new)) - set(map(id, old)) for old, new in zip(before, after, strict=True))


@MODULES
def test_passes_without_gradients_leave_what_training_asks_for(modules):
    tower = new_tower()
    with graphs_on(tower, modules=modules, **SETTINGS):
        expected = results(tower, ROWS)
    with graphs_on(tower, modules=modules, offload=OFFLOAD_MODULES, **SETTINGS) as graphs:
        results(tower, ROWS)
        for _ in range(2):
            with torch.no_grad():
                tower(*draw(ROWS))
        move(tower.decoder.layers[1])
        assert same(results(tower, ROWS), expected)
        assert graphs.statistics().fallbacks.keys() == {"mode_not_captured"}


@pytest.mark.parametrize("moved", [False, True])
def test_a_microbatch_asks_once_for_a_state_of_its_parts(moved):
    """Ranks count alike, also where one of them has to record all parts again because its memory moved."""
    tower = new_tower()
    with graphs_on(tower, modules=("attn",), offload=OFFLOAD_MODULES, **SETTINGS) as graphs:
        results(tower, ROWS)
        tower.decoder.layers[2].requires_grad_(False)
        if moved:
            move(tower.decoder.layers[0])
        for _ in range(3):
            results(tower, ROWS)
        assert graphs.statistics().fallbacks == {"parameters_changed": 1}


@MODULES
def test_buckets_on_demand(modules):
    tower = new_tower()
    options = {**SETTINGS, "buckets": "auto"}
    with graphs_on(tower, modules=modules, **SETTINGS):
        expected = [results(tower, rows) for rows in (ROWS, OTHERS)]
    with graphs_on(tower, capture=False, modules=modules, slots=2, offload=OFFLOAD_MODULES, **options) as graphs:
        results(tower, OTHERS)
        graphs.capture()
        for _ in range(6):
            graphs.begin_step()
            losses = [loss_of(forward(tower, rows)) for rows in (ROWS, OTHERS)]
            wanted = [p for p in tower.parameters() if p.requires_grad]
            found = [torch.autograd.grad(loss, wanted) for loss in losses]
        for gradients, (_, right) in zip(found, expected, strict=True):
            assert all(torch.allclose(a, b, atol=1e-5, rtol=1e-4) for a, b in zip(gradients, right, strict=True))
        buckets = {region.buckets for region in graphs._regions}
        assert len(buckets) == 1 and len(buckets.pop()) == 2
        before = graphs.statistics().fallbacks.copy()
        results(tower, ROWS)
        assert graphs.statistics().fallbacks == before


@MODULES
def test_memory_of_a_slot_is_that_of_the_largest_bucket_that_is_left(modules):
    tower, options = new_tower(), {**SETTINGS, "buckets": "auto"}
    with graphs_on(tower, capture=False, modules=modules, offload=OFFLOAD_MODULES, **options) as graphs:
        results(tower, OTHERS)
        graphs.capture()
        while len(graphs._regions[0].buckets) == 1:
            graphs.begin_step()
            results(tower, ROWS)
        assert all(region.outdated() is not None for region in graphs._regions)  # each bucket has memory of its own
        largest = max(graphs._regions[0].buckets)
        for region in graphs._regions:
            region.drop(largest)
        assert all(region.outdated() is None for region in graphs._regions)
        assert all(region._slots[0].pool is not None for region in graphs._regions)


@MODULES
def test_memory_of_parts_is_given_back_without_a_collection(modules):
    tower = new_tower()
    with graphs_on(tower, modules=modules, offload=OFFLOAD_MODULES, **SETTINGS) as graphs:
        results(tower, ROWS)
        held = [weakref.ref(slot) for region in graphs._regions for slot in region._slots]
        held += [weakref.ref(graphs._regions[0]._piece.chain.common(0).border)]
        gc.disable()
        try:
            graphs.reset()
            assert [there for there in held if there() is not None] == []
        finally:
            gc.enable()


@MODULES
def test_parts_are_recorded_again_inside_inference_mode(modules):
    """What is recorded there serves training later."""
    tower = new_tower()
    with graphs_on(tower, modules=modules, **SETTINGS):
        expected = results(tower, ROWS)
    with graphs_on(tower, modules=modules, offload=OFFLOAD_MODULES, **SETTINGS) as graphs:
        results(tower, ROWS)
        move(tower.decoder.layers[1])
        with torch.inference_mode():
            tower(*draw(ROWS))
        assert same(results(tower, ROWS), expected)
        assert not graphs.statistics().fallbacks.keys() - {"mode_not_captured"}


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


@MODULES
def test_a_part_leaves_no_more_in_the_pool_than_its_plan_keeps(modules):
    tower, executor = new_tower(), Measuring()
    settings = {**SETTINGS, "buckets": (128,), "evaluation": False}
    scopes = ("attention",) if modules == ("attn",) else ("mlp",)
    with graphs_on(tower, executor=executor, modules=modules, offload=scopes, **settings) as graphs:
        plan = planned(graphs)
    small = 4 * 1024 * len(plan.inventory.parts)  # what is below `offload_min_bytes` stays
    assert len(executor.after_forward) == len(executor.after_backward) == len(tower.decoder.layers)
    assert all(left <= small for left in executor.after_forward)
    assert executor.after_backward == [0] * len(tower.decoder.layers)
    assert plan.inventory.parts[0].nbytes > 2 * small


def target_of(tower, modules, share) -> float:
    """Return a target in GiB that so large a part of the activations fits."""
    with graphs_on(tower, modules=modules, offload=("attention", "mlp"), **SETTINGS) as graphs:
        statistics = graphs.statistics()
        static = statistics.static_bytes + statistics.gradient_bytes
        return (share * planned(graphs).inventory.nbytes + static) / 2**30


@MODULES
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_one_memory_target_holds_for_all_parts_of_a_slot(modules, share, capsys):
    tower = new_tower()
    with graphs_on(tower, modules=modules, **SETTINGS):
        expected = results(tower, ROWS)
    target = target_of(tower, modules, share)
    with graphs_on(tower, executor=ReferenceExecutor(), modules=modules, offload_above_gb=target, **SETTINGS) as graphs:
        assert same(results(tower, ROWS), expected)
        made = [region.sources.current.recordings.items() for region in graphs._regions]
        bodies = [r.recording._body for each in made for (_, b, mode), r in each if b.tokens == 128 and mode.gradients]
        peaks = [body.activations.peak_of_last for body in bodies]
        plan = planned(graphs)
        windows = [part.window for part in part_plans(plan.inventory, plan.plan)]
        assert any(peaks) and all(peak <= window for peak, window in zip(peaks, windows, strict=True))
        assert plan.plan.window <= target * 2**30
        fates = {plan.plan.fates[place] for place in range(len(plan.inventory.seen))}
        assert fates == {Fate.KEEP, Fate.OFFLOAD}
    assert "GiB kept" in capsys.readouterr().out


def test_what_earlier_parts_leave_on_the_device_counts_for_later_ones():
    inventory = Inventory((Seen(8, "attention"),), (Event("use", 0), Event("end", 0)))
    parts = [Observed(inventory, others=others, stays=stays) for others, stays in ((50, 5), (20, 7), (30, 9))]
    assert (observed_together(parts).others, observed_together(parts).stays) == (50, 21)
    assert observed_together([*parts, *parts]).others == 21 + 50
    assert observed_together(parts[:1]) is parts[0]


def test_small_and_marked_tensors_are_seen_to_stay():
    tower = new_tower()
    with graphs_on(tower, modules=("attn",), offload_above_gb=1.0, **SETTINGS) as graphs:
        offloading = graphs._regions[0]._piece.chain.offloading
        stays = {observed.stays for observed, _ in offloading._looked.values()}
        assert all(each > 0 for each in stays)


def test_a_target_that_cannot_be_kept_says_what_can():
    tower = new_tower()
    with (
        pytest.raises(CaptureError, match=r"offload_above_gb=1e-06: bucket .* needs at least"),
        graphs_on(tower, modules=("attn",), offload_above_gb=1e-6, **SETTINGS),
    ):
        pass


class Gaps(ReferenceExecutor):
    """A pool that takes so much more than its activations, as blocks leave gaps."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.recorded = nbytes, 0

    def record_forward(self, body, pool):
        self.recorded += body.activations is not None
        return super().record_forward(body, pool)

    def pool_bytes(self, pool):
        return self.nbytes if self.recorded <= 3 else 0


def test_a_slot_that_takes_more_than_its_target_has_all_parts_recorded_again():
    tower = new_tower()
    target = target_of(tower, ("attn",), 0.8)
    executor = Gaps(int(1.05 * target * 2**30))
    settings = {**SETTINGS, "buckets": (128,), "evaluation": False}
    with graphs_on(tower, executor=executor, modules=("attn",), offload_above_gb=target, **settings) as graphs:
        assert executor.recorded == 2 * len(graphs._regions)
        results(tower, ROWS)
        assert not graphs.statistics().fallbacks


class Failing(ReferenceExecutor):
    """Fails in its fourth recording, of the second slot."""

    recorded = 0

    def record_forward(self, body, pool):
        self.recorded += 1
        if self.recorded == 5:
            raise torch.OutOfMemoryError("made to fail")
        return super().record_forward(body, pool)


def test_a_failed_capture_leaves_the_encoder_eager_and_no_host_memory(caplog):
    tower = new_tower()
    options = {**SETTINGS, "strict": False, "slots": 2, "offload": OFFLOAD_MODULES, "modules": ("attn",)}
    expected = results(tower, ROWS)
    with graphs_on(tower, capture=False, executor=Failing(), **options) as graphs:
        assert not graphs.capture() and "OutOfMemory" in graphs.failure
        assert graphs.statistics().pinned_bytes == 0
        assert same(results(tower, ROWS), expected)
    assert len([r for r in caplog.records if "could not be captured" in r.message]) == 1


# Packed documents.

PACKS, SMALL = ((30, 180, 77), (300,)), {"offload_min_bytes": 1024}


@contextmanager
def on_parts(model, modules, **options):
    """Put graphs of parts of a language model's layers on it, each a region of its own."""
    values = {"capture": False, "cuda_graph_modules": modules, **options}
    with packs.graphs_on(model, packs.pack(packs.WARMUP), **values) as graphs:
        graphs.workload.family.parts = graphs.workload.family.layer_parts
        graphs.capture()
        yield graphs


@pytest.mark.parametrize(
    "modules, layers, scopes",
    [
        (["attn"], {}, {"attention"}),
        (["attn", "mlp"], {}, {"attention", "mlp", "layernorm"}),
        (["attn", "moe_router"], packs.EXPERTS, {"attention", "layernorm"}),
    ],
    ids=["attn", "attn,mlp", "experts"],
)
@pytest.mark.both_executors
def test_packs_give_what_parts_that_keep_all_give(modules, layers, scopes):
    model = packs.new_model(**layers)
    batches = [packs.pack(lengths) for lengths in PACKS]
    with packs.ON_CPU(), on_parts(model, modules):
        expected = [packs.losses_and_gradients(model, batch) for batch in batches]
    tuning = {"cuda_graph_packed_offload": "all", "cuda_graph_packed_tuning": {**SMALL, "slots": 2}}
    with packs.ON_CPU(), on_parts(model, modules, **tuning) as graphs:
        for _ in range(2):
            for batch, (losses, gradients) in zip(batches, expected, strict=True):
                found = packs.losses_and_gradients(model, batch)
                assert torch.equal(found[0], losses) and all(map(torch.equal, found[1], gradients))
        statistics, plan = graphs.statistics(), planned(graphs)
        assert not statistics.fallbacks and statistics.pinned_bytes > 0
        assert scopes <= {plan.inventory.seen[place].scope for place in plan.plan.places(Fate.OFFLOAD)}


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
    right, model = packs.new_model(), packs.new_model()
    for each in (right, model):
        without_gradients(each.decoder.layers[0])
    batch = packs.pack(PACKS[0])
    tuning = {"cuda_graph_packed_offload": "all", "cuda_graph_packed_tuning": SMALL}
    with packs.ON_CPU(), on_parts(model, ["attn", "mlp"], **tuning) as graphs:
        for _ in range(4):
            losses, expected = model(**batch), right(**batch)
            wanted = [list(each.decoder.layers[1].parameters()) for each in (model, right)]
            found = [torch.autograd.grad(each.sum(), own) for each, own in zip((losses, expected), wanted, strict=True)]
            assert_close([losses, *found[0]], [expected, *found[1]])
        assert graphs.statistics().replays == 4 * 2
