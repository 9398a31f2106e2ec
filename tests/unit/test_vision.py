from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bridge_cg_plugin.graphs.errors import CaptureError
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.graphs.reports import metrics
from bridge_cg_plugin.offload import host
from bridge_cg_plugin.offload.plan import Fate
from bridge_cg_plugin.options import OFFLOAD_MODULES
from bridge_cg_plugin.upstream.hooks.helpers.graph_helper import active_helpers

from ..main_grads import give_main_grads
from .mixes import FITTING, IMAGES, ONE_OVER, ONE_UNIT, TOO_MANY_FRAMES
from .towers import assert_close, forward, graphs_on, loss_of, new_helper, new_tower, planned, poison, results, tower

side = st.integers(1, 4).map(lambda n: 2 * n)


batches = st.lists(
    st.lists(st.tuples(st.integers(1, 3), side, side).map(list), min_size=1, max_size=4), min_size=1, max_size=4
)


@pytest.mark.both_executors
@pytest.mark.parametrize("deepstack", [True, False])
def test_any_sequence_of_microbatches_equals_eager(deepstack):
    model, eager = new_tower(deepstack=deepstack), new_tower(deepstack=deepstack)
    assert len(forward(eager, IMAGES)) == (3 if deepstack else 1)

    @settings(max_examples=8)
    @given(sequence=batches)
    @example(sequence=FITTING)
    def check(sequence):
        for seed, rows in enumerate(sequence):
            poison(graphs, float("nan"))
            outputs, gradients = results(model, rows, seed)
            expected = results(eager, rows, seed)
            assert_close(outputs, expected[0])
            assert_close(gradients, expected[1])

    with graphs_on(model) as graphs:
        check()
        assert graphs.statistics().replays >= len(FITTING)
        assert set(graphs.statistics().fallbacks) <= {"too_many_tokens"}


def test_small_microbatches_need_a_bucket_of_their_size():
    model = new_tower()
    cases = [([[1, 4, 8]], True), ([[1, 4, 8], [1, 2, 2]], False), (ONE_UNIT, False), (ONE_OVER, True)]
    with graphs_on(model, buckets=(32, 96, 128), exact_below=64) as graphs:
        for rows, replayed in cases:
            before = graphs.statistics().replays
            forward(model, rows)
            assert (graphs.statistics().replays > before) == replayed
        assert graphs.statistics().fallbacks == {"too_few_tokens": 2}


def test_an_eager_fallback_after_a_replay_is_no_first_microbatch():
    """A linear module that adds weight gradients to main_grad itself overwrites it in the first one that it sees."""
    model = new_tower()
    linear = model.decoder.layers[0].self_attention.linear_qkv
    with graphs_on(model, max_frames=4):
        for rows, stays in ((IMAGES, True), (TOO_MANY_FRAMES, False)):
            linear.is_first_microbatch = True
            forward(model, rows)
            assert linear.is_first_microbatch is stays


@pytest.mark.both_executors
def test_gradients_that_a_loop_leaves_between_microbatches_add_up_as_in_eager():
    """Autograd keeps what it gets first as `.grad` and adds the next in place, replayed or eager."""
    models = eager, model = new_tower(), new_tower()
    for each in models:
        give_main_grads(each.parameters(), torch.zeros(sum(p.numel() for p in each.parameters())))
    with graphs_on(model, buckets=(16,)) as graphs:
        for _ in range(2):
            for seed, rows in enumerate([[[1, 4, 4]], [[1, 4, 8]], [[1, 4, 4]], [[1, 4, 4]], [[1, 4, 8]]]):
                for each in models:
                    loss_of(forward(each, rows, seed)).backward()
                poison(graphs, float("nan"))
            parameters = [list(each.parameters()) for each in (model, eager)]
            assert_close(*([p.grad for p in each] for each in parameters))
            for each in models:
                each.zero_grad()
        assert graphs.statistics().replays == 6 and graphs.statistics().fallbacks == {"too_many_tokens": 4}


@pytest.mark.parametrize(
    ("kernels", "deterministic", "fast"),
    [
        ("fast", "", True),
        ("fast", "NVTE", True),
        ("exact", "", False),
        ("auto", "", True),
        ("auto", "NVTE", False),
        ("auto", "torch", False),
    ],
)
def test_which_kernels_may_round_otherwise_than_eager(monkeypatch, kernels, deterministic, fast):
    if deterministic == "NVTE":
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    elif deterministic == "torch":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    entered = []

    @contextmanager
    def note(modules):
        entered.append(modules)
        yield

    with graphs_on(tower(), capture=False, kernels=kernels) as graphs:
        kernels = graphs.workload.kernels
        kernels.family = replace(kernels.family, reordering_kernels=note)
        with kernels(()):
            pass
    assert bool(entered) == fast


def test_an_eager_pass_waits_for_parameters_as_a_replay_does():
    """Gathers of all ranks go over one communicator, so they must start in one order, whatever a rank runs."""
    model, waited = new_tower(), []
    with graphs_on(model, capture=False) as graphs:
        graphs.surroundings = replace(graphs.surroundings, before_replay=lambda: waited.append(1))
        forward(model, IMAGES)
        assert waited
        graphs.capture()
        for rows in (IMAGES, [(1, 20, 20)]):
            waited.clear()
            forward(model, rows)
            assert waited
        graphs.reset()
        graphs.failure = "made to fail"
        waited.clear()
        forward(model, IMAGES)
        assert waited


def test_a_capture_inside_inference_mode_serves_training_later():
    model, sizes = new_tower(), ([[1, 8, 8]], [[1, 12, 8]])
    expected = [results(model, rows) for rows in sizes]
    with graphs_on(model, capture=False, buckets="auto") as graphs:
        with torch.inference_mode():
            for rows in sizes:
                forward(model, rows)
                assert graphs.captured or graphs.capture()
                for _ in range(4):
                    graphs.begin_step()
        for rows, (outputs, gradients) in zip(sizes, expected, strict=True):
            actual = results(model, rows)
            assert_close(actual[0], outputs)
            assert_close(actual[1], gradients)
        assert graphs.statistics().replays >= len(sizes)


def test_an_encoder_is_released_whose_helper_went_with_the_run(capsys):
    model = new_tower()
    made = [new_helper(model)]
    made[0].create_cudagraphs()
    first = made.pop().graphs
    again = new_helper(model)
    assert not first.captured and again in active_helpers() and "CUDA graphs" in capsys.readouterr().out
    again.delete_cuda_graphs()
    assert again not in active_helpers() and again.graphs is None
    assert "forward" not in vars(model) and not model._forward_pre_hooks


LEAST_BYTES = 1024

ROWS = [(1, 8, 8), (2, 4, 8)]
SETTINGS = {"buckets": (128,)}


@pytest.mark.parametrize("scopes", [("attention",), ("mlp", "layernorm"), OFFLOAD_MODULES])
def test_only_what_was_named_leaves_and_nothing_changes(scopes):
    tower = new_tower()
    with graphs_on(tower, **SETTINGS):
        expected = results(tower, ROWS)
    with graphs_on(tower, offload=scopes, slots=2, **SETTINGS) as graphs:
        for _ in range(2):
            outputs, gradients = results(tower, ROWS)
            assert all(map(torch.equal, outputs, expected[0]))
            assert all(map(torch.equal, gradients, expected[1]))
        found = planned(graphs)
        offloaded = found.places(Fate.OFFLOAD)
        assert {found.inventory.seen[place].scope for place in offloaded} == set(scopes)
        assert all(found.inventory.seen[p].scope not in scopes for p in found.places(Fate.KEEP))
        statistics = graphs.statistics()
        assert statistics.pinned_bytes >= 2 * sum(found.inventory.seen[place].nbytes for place in offloaded)
        assert "offloaded activations:" in graphs.report()
        assert metrics(statistics, "v")["v/pinned_gb"] == statistics.pinned_bytes / 2**30
        assert not statistics.fallbacks


def test_host_memory_for_all_slots_is_looked_for_before_the_first_capture(monkeypatch):
    monkeypatch.setattr(host, "available_bytes", lambda: 1 << 20)
    recorded = []
    tower = new_tower()
    record = ReferenceExecutor.record_forward
    monkeypatch.setattr(ReferenceExecutor, "record_forward", lambda self, *a: recorded.append(1) or record(self, *a))
    with (
        pytest.raises(CaptureError, match=r"HostMemoryError.*vision_cuda_graph_slots|HostMemoryError.*fewer slots"),
        graphs_on(tower, offload=OFFLOAD_MODULES, slots=64, **SETTINGS),
    ):
        pass
    assert not recorded
