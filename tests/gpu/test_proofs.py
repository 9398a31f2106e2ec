"""Replays compared with eager on a GPU: nothing is found where nothing is wrong, and faults are."""

import math
import time
from statistics import fmean, stdev

import pytest
import torch

from bridge_cg_plugin.graphs.proofs import schedule
from tests.models import language_model as lm

from .packs import Trained, double_rows, graphs_on

GRIDS = ([(1, 32, 32)], [(1, 28, 28)], [(1, 20, 20)] * 4, [(4, 10, 14), (1, 28, 20)])
SLEEP_S, CYCLES_PER_S = 20.0, 2e9
PROOFS = 64
# Standard deviations beyond which 1e-5 of a normal distribution lies.
FAR = 4.26


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Compare a replay of each step."""
    monkeypatch.setattr(schedule, "FIRST_SHARE", 1e9)
    monkeypatch.setattr(schedule, "SHARE", 1e9)
    monkeypatch.setattr(schedule, "LEAST_STEPS", 1)


@pytest.fixture(params=["tower", "packs", "parts", "padded rows"])
def replayed(request, tower_module):
    """Yield the graphs of a model and a function that trains one microbatch of a number."""
    if request.param == "tower":
        from .common import vision_graphs

        model = tower_module.build_tower(layers=4)
        grads = tower_module.MainGrads(model)
        helper = vision_graphs(model, strict=False, buckets=(1024, 1600))

        def run(number):
            grads.zero()
            tower_module.step(model, tower_module.make_batch(GRIDS[number % len(GRIDS)], model, seed=number))

        yield helper.graphs, run
        helper.delete_cuda_graphs()
        return
    made = Trained(lm.build_model(lm.Shape(layers=4, hidden=1024, heads=8, ffn=3072)))
    packs = [lm.make_pack(lengths, seed=seed) for seed, lengths in enumerate([(500, 524), (300, 400, 100), (900,)])]
    options = {"cuda_graph_packed_strict": False}
    if request.param == "padded rows":
        packs = [lm.make_pack((1024,), seed=seed) for seed in range(3)]
        for pack in packs:
            pack.arguments["packed_seq_params"] = None
        options |= {"cuda_graph_max_packed_seqs": None, "cuda_graph_packed_buckets": None}
    if request.param == "parts":
        options |= {"modules": ["attn"], "by_layer": True}
    with graphs_on(made.model, packs[0], **options) as graphs:
        yield graphs, lambda number: made.results(packs[number % len(packs)])


def train(graphs, run, steps):
    for number in range(steps):
        with graphs.step():
            run(number)


def test_what_is_right_is_no_alarm(replayed, monkeypatch):
    """Nor is it by chance: of a log-normal distribution of differences fewer than one in 1e5 is beyond its bound."""
    graphs, run = replayed
    passed, shares = graphs.proofs.proven, []

    def proven(proved):
        shares.append(
            max((each.difference / each.bound for each in proved.comparison._found.values() if each.bound), default=0.0)
        )
        passed(proved)

    monkeypatch.setattr(graphs.proofs, "proven", proven)
    train(graphs, run, PROOFS)
    assert len(graphs.proofs.results) == PROOFS and not graphs.statistics().fallbacks, graphs.report()
    assert not graphs.proofs.excluded and all(gradient is not None for _, gradient in graphs.proofs.results)
    print(graphs.report())
    differing = [math.log(share) for share in shares if share]
    if len(differing) > 1:
        center = fmean(differing)
        far = center + FAR * stdev(differing)
        print(f"largest differences by their bounds: {math.exp(center):.3f}, one in 1e5 {math.exp(far):.3f}")
        assert far < 0


def wrong_kernel(graphs, recording, sinks):
    double_rows(recording)


def wrong_gradient(graphs, recording, sinks):
    backward = recording.backward

    def wrong():
        gradients, main_grad = backward(), sinks.added_to()[1]
        (gradients.parameters[1] if main_grad is None else main_grad).zero_()
        return gradients

    recording.backward = wrong


@pytest.mark.parametrize("fault", [wrong_kernel, wrong_gradient])
def test_a_fault_is_found(replayed, fault):
    graphs, run = replayed
    for region in graphs._regions:
        for source in region.sources:
            for made in source.recordings.values():
                fault(graphs, made.recording, source.sinks)
    train(graphs, run, 2 * len(graphs._regions) + 2)
    assert any(region.disproved for region in graphs._regions), graphs.report()


def test_a_proof_waits_for_no_other_stream(replayed):
    """As one that receives from a pipeline stage, which waits for this rank."""
    graphs, run = replayed
    proven = len(graphs._regions)
    train(graphs, run, proven)  # the first proof of each may load kernels, which waits for all streams
    torch.cuda.synchronize()
    other, began = torch.cuda.Stream(), time.perf_counter()
    with torch.cuda.stream(other):
        torch.cuda._sleep(int(SLEEP_S * CYCLES_PER_S))
    train(graphs, run, 1)
    assert len(graphs.proofs.results) == proven + 1
    assert time.perf_counter() - began < SLEEP_S / 2
    torch.cuda.synchronize()
