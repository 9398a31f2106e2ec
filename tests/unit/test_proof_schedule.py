"""When replays are compared with eager, and what follows where they differ."""

import random
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from bridge_cg_plugin.graphs.errors import ProofError
from bridge_cg_plugin.graphs.proofs import schedule
from bridge_cg_plugin.switches import PROOF

from ..ranks import run_ranks
from . import packs
from .dispatching import dispatching_on_cpu
from .proof_kinds import (
    KINDS,
    PARALLEL,
    ROWS,
    WRONG,
    Attention,
    Decoder,
    Tower,
    close,
    disproved,
    messages,
    proven,
    step,
    training,
    unproven,
    wrong_gradient,
    wrong_kernel,
    wrong_metadata,
)
from .test_expert_ranks import on_graphs, rank_model
from .towers import assert_close, forward, graphs_on, loss_of

pytestmark = pytest.mark.usefixtures("first_proofs")


@KINDS
@PARALLEL
def test_recordings_are_proven_by_their_first_training_microbatches(kind, parallel):
    with training(kind, parallel) as (model, graphs, eager):
        regions, left = len(close(graphs)._regions), unproven(graphs)
        for steps in range(1, regions + 3):
            assert_close(step(kind, model, graphs, (0, 1)), step(kind, eager, None, (0, 1)))
            assert len(proven(graphs)) == min(steps, regions), "one a step"
        assert unproven(graphs) == left - regions
        assert all(0 <= outputs < 1e-5 and 0 <= gradients < 1e-5 for outputs, gradients in proven(graphs))
        assert f"proofs: {regions} replays compared with eager, {regions} with gradients" in (report := graphs.report())
        buckets = sorted({bucket for region in graphs._regions for bucket in region.unproven})
        named = f", of {', '.join(map(str, buckets))}" if buckets else ""
        assert f"recordings without a proof: {unproven(graphs)}{named};" in report
        assert not graphs.statistics().fallbacks


@KINDS
def test_switched_off_no_fault_is_found(kind, monkeypatch, caplog):
    monkeypatch.setenv(PROOF, "0")
    with training(kind) as (model, graphs, eager):
        wrong_kernel(kind, graphs, monkeypatch, random.Random(0))
        found, expected = step(kind, model, graphs), step(kind, eager)
        assert graphs.proofs is None and not messages(caplog)
        with pytest.raises(AssertionError, match="differs by"):
            assert_close(found, expected)


@pytest.mark.parametrize("kind", [Tower, Attention, Decoder])
def test_strict_stops_at_the_second_failure(kind, monkeypatch):
    with training(kind, strict=True) as (model, graphs, _):
        wrong_kernel(kind, graphs, monkeypatch, random.Random(0))
        step(kind, model, graphs)
        with pytest.raises(ProofError, match="output . differs from eager's by .*second time"):
            step(kind, model, graphs)


@pytest.mark.parametrize("kind", [Tower, Attention])
def test_each_region_is_compared_again_in_its_turn(kind, monkeypatch):
    monkeypatch.setattr(schedule, "LEAST_STEPS", 4)
    monkeypatch.setattr(schedule, "SHARE", 1e9)
    found = []
    monkeypatch.setattr(
        schedule.Proofs, "proven", lambda self, proof: found.append((self._step, proof.comparison.part.name))
    )
    with training(kind) as (model, graphs, _):
        for source in (source for region in graphs._regions for source in region.sources):
            source.unproven.clear()
        for _ in range(4 * len(graphs._regions) + 3):
            step(kind, model, graphs)
        regions = [region.name for region in graphs._regions]
        assert [number for number, _ in found] == [4 * (turn + 1) for turn in range(len(regions))]
        assert {name for _, name in found} == set(regions)


@pytest.mark.parametrize("cost", [0.0, 0.3, 7.0])
def test_proofs_take_no_more_than_their_shares_of_the_time(cost, monkeypatch):
    """Steps take a second each, and comparing takes as much more as is given."""
    monkeypatch.setattr(schedule, "FIRST_SHARE", 0.01)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(schedule.time, "perf_counter", lambda: clock.now)
    with training(Tower) as (model, graphs, _):
        proofs, (region,) = graphs.proofs, graphs._regions
        taken, at = [0.0], []
        for number in range(1, 14001):
            clock.now += 1
            proofs.begin_step(number, [region])
            if not proofs.may_be_due(region):
                continue
            at.append(number)
            compared = SimpleNamespace(begun=clock.now, seconds=0.0, counted=False)
            clock.now += cost
            proofs.agreed(compared, failed=False, left_out=False)
            taken.append(taken[-1] + cost)
            if number > 2000:  # all are proven: those that follow come again
                for source in region.sources:
                    source.unproven.clear()
        firsts = sum(number <= 2000 for number in at)
        assert cost * (firsts - 1) <= 0.01 * 2000 and cost * (len(at) - firsts - 1) <= 0.0025 * 12000
        assert len(at) >= firsts + 1 > 2
        proofs.results.append((0.0, None))
        assert f"one of every {at[-1] - at[-2]} steps is compared" in graphs.report()


class Split(Tower):
    """An encoder whose layers two ranks share, run by the reference executor: tapes exchange nothing."""

    sizes = {"tensor_model_parallel_size": 2}
    around = nullcontext
    graphs = staticmethod(partial(graphs_on, strict=False))


class Experts:
    """Layers whose experts two ranks share as one region; each rank has packs of its own."""

    sizes = {"expert_model_parallel_size": 2}
    around = staticmethod(dispatching_on_cpu)
    new = staticmethod(rank_model)
    metadata = ("angles", "cu_seqlens_q")
    graphs = staticmethod(partial(on_graphs, cuda_graph_packed_strict=False))

    @staticmethod
    def run(model, seed=0):
        return loss_of([model(**packs.pack((25, 30 + 9 * distributed.get_rank(), 12), seed))])


def on_one_rank(kind, fault):
    """Train over a fault on rank 1 alone; returns how many regions are disproved, fallbacks and messages."""
    patch, said = pytest.MonkeyPatch(), []
    patch.setattr(schedule, "warn", said.append)
    patch.setattr(schedule, "FIRST_SHARE", 1e9)
    with kind.around(), packs.small_packs(), training(kind) as (model, graphs, eager):
        if distributed.get_rank() == 1:
            fault(kind, graphs, patch, random.Random(0))
        for _ in range(4):
            assert_close(step(kind, model, graphs), step(kind, eager))
        return len(disproved(graphs)), graphs.statistics().fallbacks[WRONG], said


@pytest.mark.parametrize("kind", [Split, Experts])
@pytest.mark.parametrize("fault", [wrong_kernel, wrong_metadata, wrong_gradient])
def test_a_fault_on_one_rank_makes_both_eager(tmp_path, kind, fault):
    first, second = run_ranks(2, on_one_rank, tmp_path, kind, fault, **kind.sizes)
    assert first[:2] == second[:2] and first[0] == 1
    spreads = (kind, fault) == (Split, wrong_metadata)  # by what the layers exchange
    assert ("another rank" in first[2][0]) != spreads and "another rank" not in second[2][0]


def test_what_memory_is_too_short_for_is_not_compared(monkeypatch, capsys):
    with training(Tower) as (model, graphs, eager):
        for share, results in ((schedule.ROOM, [(0.0, None)]), (schedule.FORWARD_ROOM, [])):
            for source in graphs._regions[0].sources:
                source.unproven.update(source.recordings)
                monkeypatch.setattr(
                    schedule.Proofs, "has_room", lambda self, needed, share=share: needed < share * NBYTES
                )
                for made in source.recordings.values():
                    made.nbytes = NBYTES
            graphs.proofs.results.clear()
            for _ in range(2):
                step(Tower, model, graphs)
            assert [gradient for _, gradient in proven(graphs)] == [None] * len(results)
        assert_close(step(Tower, model, graphs), step(Tower, eager))
        assert capsys.readouterr().out.count("not compared with eager: free memory") == 2
        assert "not compared with eager, gradients of vision_encoder: free memory" in graphs.report()


NBYTES = 1000


def test_passes_of_an_evaluation_are_compared_as_well():
    with training(Tower) as (model, graphs, _):
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                forward(model, ROWS)  # the second one has a recording
        assert not proven(graphs)
        graphs.before_evaluation()
        with torch.no_grad():
            forward(model, ROWS)
        assert proven(graphs) == [(proven(graphs)[0][0], None)]
