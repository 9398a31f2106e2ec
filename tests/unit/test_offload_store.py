"""What the store saves, moves and gives back, through the reference executor."""

import gc
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bridge_cg_plugin.graphs.buckets import Bucket
from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.offload import never_offload
from bridge_cg_plugin.offload.offloading import RegionOffloading
from bridge_cg_plugin.offload.plan import Fate, Plan, Policy, kept_bytes, needed_at_once
from bridge_cg_plugin.offload.registry import OTHER, derive, rewrite
from bridge_cg_plugin.offload.store import ActivationStore
from tests.executors import new_executor
from tests.saving import Saver, SaverProgram, batch_of, results

from ..regions import new_region

CPU = torch.device("cpu")
# Forwards before the recorded one: warm-up, the pass that is looked at, and the one that is observed.
PASSES_BEFORE = 3
EVERYTHING = Policy(frozenset({OTHER}), frozenset({"square", "sum"}), least_bytes=1)


class LateTransfers:
    """Copies as late as their order allows: what does not wait, or gives memory back too early, is seen."""

    def __init__(self) -> None:
        self.loads = self.offloads = 0

    def begin(self) -> None:
        pass

    def offload(self, source, host):
        self.offloads += 1
        host.fill_(0x55)
        return lambda: host.copy_(source)

    def load(self, host):
        self.loads += 1
        fresh = torch.full_like(host, 0x55)
        return fresh, lambda: fresh.copy_(host)

    def wait(self, token) -> None:
        token()


def saver_region(policy=EVERYTHING, transfers=None, program=None):
    """Capture a region; returns it and its offloading."""
    offloading = RegionOffloading(policy, 1, CPU)
    if transfers is not None:
        offloading._transfers = transfers
    region = new_region(program or SaverProgram(Saver()), new_executor(), [Bucket(8)], offloading=offloading)
    region.capture()
    return region, offloading


def planned_of(offloading):
    """Return the only plan with its inventory."""
    ((planned,),) = offloading._plans.values()
    return planned


def stores(region):
    """Return the stores of a region's recordings."""
    found = (r.recording._body.activations for r in region.sources.current.recordings.values())
    return [store for store in found if isinstance(store, ActivationStore)]


@pytest.mark.reference_executor
def test_tensors_come_back_as_they_were_and_what_shares_memory_is_copied_once():
    transfers = LateTransfers()
    region, offloading = saver_region(transfers=transfers)
    planned = planned_of(offloading)
    transfers.loads = transfers.offloads = 0
    model, (store,) = region.program.model, stores(region)
    for seed in range(2):
        region.run(batch_of(8, seed))  # without its backward, which leaves nothing
        gc.collect()
    assert not transfers.loads
    transfers.offloads = 0
    model.log.clear()
    results(region.run, batch_of(8, 0), model.parameters())
    assert model.log["returned"].layouts == model.log["saved"].layouts
    assert model.log["returned"].groups == model.log["saved"].groups
    assert not store._leaving and not store._there
    assert transfers.offloads == transfers.loads == len(planned.places(Fate.OFFLOAD))
    # Twelve dtypes, then whole, scales, quantized, the sum and the strided one: nothing is copied for a second view.
    assert len(planned.inventory.seen) < len(region.program.model.weights) * 20


def test_parameters_static_inputs_small_and_marked_tensors_stay():
    region, offloading = saver_region(Policy(frozenset({OTHER}), frozenset(), least_bytes=1 << 20))
    assert offloading.pinned_bytes == 0 and not stores(region)

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(32))

        def forward(self, x):
            marked = x @ self.weight
            never_offload(marked)
            return marked * marked

    region, offloading = saver_region(program=SaverProgram(Products()))
    assert not next(iter(offloading._plans.values())) and not stores(region)


class InPlace(nn.Module):
    """Writes to a tensor before it is saved, and in the recorded forward after it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = count(1)
        self.weight = nn.Parameter(torch.eye(32))

    def forward(self, x):
        made = x @ self.weight
        made.mul_(2)  # which is fine
        out = made * made
        if next(self.calls) > PASSES_BEFORE:
            made.detach().add_(1)
        return out


class Squares(nn.Module):
    """Saves squares that can be recomputed, in place too, rightly or wrongly."""

    def __init__(self, wrong: bool = False, in_place: bool = False, unnoted: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(32) * 1.1)
        self.wrong, self.in_place, self.unnoted = wrong, in_place, unnoted
        self.rebuilt = SimpleNamespace(times=0)  # a plain number that changes refuses a capture

    def square(self, x, weight):
        self.rebuilt.times += 1
        return (x @ weight).square() + (0.5 if self.wrong else 0)

    def forward(self, x):
        x = (x @ self.weight).tanh()
        made = (x @ self.weight).square()
        derive(made, "square", (x, self.weight), self.square)
        if self.in_place:
            made.detach().data.mul_(3)  # unseen by autograd, as a kernel may write
            rewrite(made, (), lambda whole: whole.mul_(3))
        if self.unnoted:
            made.mul_(3)
        return made.sin() * x.cos()


@pytest.mark.reference_executor
@pytest.mark.parametrize("kind, rebuilt", [((), 1), (("in_place",), 1), (("wrong",), 0), (("unnoted",), 0)], ids=str)
def test_what_is_recomputed_to_the_bit_is_made_again_and_nothing_else(kind, rebuilt, capsys):
    region, offloading = saver_region(
        program=SaverProgram(Squares(**dict.fromkeys(kind, True))), transfers=LateTransfers()
    )
    assert len(planned_of(offloading).places(Fate.REBUILD)) == rebuilt
    assert ("not recomputed" in capsys.readouterr().out) == ("wrong" in kind)
    batch, model = batch_of(8, 0), region.program.model
    expected = results(model, batch, model.parameters())
    model.rebuilt.times = 0
    assert all(map(torch.equal, results(region.run, batch, model.parameters()), expected))
    assert model.rebuilt.times == rebuilt


class Wavering(Squares):
    """Saves another tensor in the recorded forward than in the passes before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = count(1)

    def forward(self, x):
        other = next(self.calls) > PASSES_BEFORE
        return super().forward(x) + ((x @ self.weight).square().exp() if other else 0)


@pytest.mark.parametrize("kind, said", [(InPlace, "written to since"), (Wavering, "saved other tensors")])
def test_a_forward_that_writes_to_what_it_saved_or_saves_other_tensors_than_before_is_an_error(kind, said):
    with pytest.raises(CaptureError, match=said):
        saver_region(program=SaverProgram(kind()))


class Layers(nn.ModuleList):
    """Squares behind each other."""

    def __init__(self) -> None:
        super().__init__(Squares() for _ in range(3))

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


@given(st.integers(0, 2**14), st.lists(st.sampled_from(list(Fate)), min_size=64, max_size=64))
def test_any_window_and_any_fates_give_the_same_gradients(window, fates):
    region, _ = saver_region(program=SaverProgram(Layers()), transfers=LateTransfers())
    (store,) = stores(region)
    inventory = store._inventory
    chosen = tuple(
        Fate.KEEP if fate is Fate.REBUILD and s.kind is None else fate
        for s, fate in zip(inventory.seen, fates, strict=False)
    )
    needed = needed_at_once(inventory, chosen)
    store._plan = Plan(inventory, chosen, window, needed)
    store._hosts = {place: torch.empty(s.nbytes, dtype=torch.uint8) for place, s in enumerate(inventory.seen)}
    batch, model = batch_of(8, 0), region.program.model
    expected = results(model, batch, model.parameters())
    assert all(map(torch.equal, results(region.run, batch, model.parameters()), expected))
    assert store.peak_of_last <= max(window, kept_bytes(inventory, chosen) + needed)
    assert not store._resident and not store._there and not store._tokens
