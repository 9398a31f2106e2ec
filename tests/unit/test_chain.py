"""Parts of layers whose activations leave: they share a slot's memory and compute what parts that keep all compute."""

import pytest
import torch

from bridge_cg_plugin.graphs.memory.pools import SlotMemory
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.graphs.recordings.recording import STAY
from bridge_cg_plugin.offload.plan import Fate

from . import packs
from .packed_parts import APART, LARGE, SMALL, new_model, on_parts, results, same
from .towers import assert_close

LEAST_BYTES = 1024


def planned(graphs):
    """Return the plans of the largest bucket's parts with their inventories."""
    plans = graphs._regions[0].chain.offloading._plans
    return plans[max(plans)]


def bytes_of(parts):
    """Return what parts save in bytes."""
    return sum(plan.inventory.nbytes for plan in parts)


def expected_of(model, modules, *lengths):
    """Return results of parts that keep all."""
    with on_parts(model, modules, APART):
        return [results(model, each) for each in lengths]


@pytest.mark.parametrize(
    "modules, layers, scopes",
    [
        (["attn", "mlp"], {}, {"attention", "mlp", "layernorm"}),
        (["attn", "moe_router"], packs.EXPERTS, {"attention", "layernorm"}),
    ],
    ids=["dense", "experts"],
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
        assert {fate for plan in parts for fate in plan.fates} == {Fate.OFFLOAD}
        assert scopes <= {seen.scope for plan in parts for seen in plan.inventory.seen}
    assert graphs.statistics().pinned_bytes == 0


def test_a_part_leaves_no_more_in_the_pool_than_its_plan_keeps():
    model = new_model()
    with on_parts(model, buckets=[512]) as graphs:
        for region in graphs._regions:
            ((mode, recorded),) = ((place[2], made) for place, made in region.sources.current.recordings.items())
            forward, backward = recorded.recording._forward, recorded.recording._backward
            left = sum(len(block.memory) for block in forward._after - forward._before)
            assert mode.gradients and left <= 4 * LEAST_BYTES < bytes_of(planned(graphs)) / 2
            assert backward._after <= forward._before


def target_of(model, modules, share) -> float:
    """Return a target in GiB that so large a part of the activations fits."""
    with on_parts(model, modules, ("attention", "mlp")) as graphs:
        statistics = graphs.statistics()
        static = statistics.static_bytes + statistics.gradient_bytes
        return (share * bytes_of(planned(graphs)) + static) / 2**30


@pytest.mark.parametrize("modules, share", [(("attn",), 0.5), (("mlp",), 0.8)])
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
        plans = planned(graphs)
        assert any(peaks) and all(peak <= plan.window for peak, plan in zip(peaks, plans, strict=True))
        assert plans[0].window <= target * 2**30
        assert {fate for plan in plans for fate in plan.fates} == {Fate.KEEP, Fate.OFFLOAD}
    assert "GiB kept" in capsys.readouterr().out


class Gaps(ReferenceExecutor):
    """Its memory takes so much more than activations, as blocks leave gaps."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes, self.recorded, self.parts = nbytes, 0, 3

    def record_forward(self, body, pool):
        self.recorded += body.activations is not STAY
        return super().record_forward(body, pool)

    def new_memory(self):
        executor = self

        class Memory(SlotMemory):
            nbytes = property(lambda self: executor.nbytes if executor.recorded <= executor.parts else 0)

        return Memory()


def test_a_slot_that_takes_more_than_its_target_has_all_parts_recorded_again():
    model = new_model()
    target = target_of(model, ("attn",), 0.8)
    executor = Gaps(int(1.05 * target * 2**30))
    with on_parts(model, offload=None, executor=executor, offload_above_gb=target, buckets=[512]) as graphs:
        assert executor.recorded % len(graphs._regions) == 0 and executor.recorded > len(graphs._regions)
        results(model, LARGE)
        assert not graphs.statistics().fallbacks


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
