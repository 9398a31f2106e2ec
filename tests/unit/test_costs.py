"""Eager or replay, by measured times."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge_cg_plugin.graphs.manager import GraphManager
from bridge_cg_plugin.graphs.planning.buckets import Bucket
from bridge_cg_plugin.graphs.recordings.executor import ReferenceExecutor
from bridge_cg_plugin.options import VisionGraphOptions
from bridge_cg_plugin.upstream.encoders.qwen3_vl import QWEN3_VL
from bridge_cg_plugin.vision.batch import VisionBatch
from bridge_cg_plugin.vision.eager_costs import MARGIN, TIMED_REPLAYS, MeasuredCosts, Shape, Timing
from bridge_cg_plugin.vision.workload import VisionWorkload

from .towers import DEFAULTS, assert_close, new_tower, results

BUCKET = Bucket(4096, (32, 4096))


class Stopwatch:
    """A clock that stands still; `reached` says whether the device is past every mark."""

    def __init__(self) -> None:
        self.now, self.reached = 0.0, True

    def event(self) -> float:
        return self.now

    def elapsed(self, start, end):
        return end - start if self.reached else None


@pytest.fixture
def clock():
    return Stopwatch()


@pytest.fixture
def costs(clock):
    return MeasuredCosts(clock)


def batch_of(tokens, frames=1, largest=None):
    side = largest or tokens
    rows = ((1, 1, side), *((1, 1, (tokens - side) // max(frames - 1, 1)),) * (frames - 1))
    return VisionBatch(torch.empty(tokens, 0), torch.empty(0), rows)


def finish(timing: Timing | None, clock, ms: float) -> None:
    """Let a microbatch take `ms`, a third of it forward, with other work between forward and backward."""
    if timing is None:
        return
    clock.now += ms / 3
    timing.forward_ended()
    clock.now += 1e6
    timing.before_backward()
    clock.now += ms * 2 / 3
    timing.after_backward()


def measure(costs, clock, eager=(), replays=()):
    for shape, ms in eager:
        finish(costs.time_eager(batch_of(*shape)), clock, ms)
    for bucket, ms in replays:
        finish(costs.time_replay(bucket), clock, ms)
    costs._collect()


def test_only_forward_and_backward_count(costs, clock):
    measure(costs, clock, [((800,), 75.0)], [(BUCKET, 40.0)] * TIMED_REPLAYS)
    assert costs.eager_bound(Shape(800, 1, 800)) == pytest.approx(75.0)
    assert costs.replay_ms(BUCKET) == pytest.approx(40.0)


def test_any_number_of_shapes_takes_bounded_memory(costs, clock, monkeypatch):
    monkeypatch.setattr("bridge_cg_plugin.vision.eager_costs.KEPT_ANSWERS", 3)
    measure(costs, clock, [((800,), 75.0)], [(BUCKET, 200.0)] * TIMED_REPLAYS)
    for tokens in range(1, 11):
        assert costs.eager_is_faster(Shape(tokens, 1, tokens), BUCKET)
    assert len(costs._choices) <= 3


def test_a_replay_that_still_runs_is_not_waited_for(costs, clock):
    measure(costs, clock, [((800,), 75.0)])
    clock.reached = False
    for _ in range(TIMED_REPLAYS):
        finish(costs.time_replay(BUCKET), clock, 200.0)
    assert not costs.eager_is_faster(Shape(800, 1, 800), BUCKET)
    clock.reached = True
    assert costs.eager_is_faster(Shape(800, 1, 800), BUCKET)


def test_a_first_replay_that_waited_for_its_recording_decides_nothing(costs, clock):
    measure(costs, clock, [((800,), 75.0)], [(BUCKET, 700.0)])
    assert not costs.eager_is_faster(Shape(800, 1, 800), BUCKET)
    measure(costs, clock, replays=[(BUCKET, 20.0)] * 2)
    assert not costs.eager_is_faster(Shape(800, 1, 800), BUCKET) and costs.replay_ms(BUCKET) == pytest.approx(20.0)


def test_a_few_replays_of_a_bucket_are_timed_and_the_smallest_counts(costs, clock):
    times = [30.0, 20.0, 25.0, 1.0]
    assert len(times) == TIMED_REPLAYS + 1
    measure(costs, clock, replays=[(BUCKET, ms) for ms in times])
    assert costs.replay_ms(BUCKET) == pytest.approx(20.0)
    assert costs.time_replay(BUCKET) is None


def test_a_replay_without_a_backward_leaves_room_for_others(costs, clock):
    for _ in range(TIMED_REPLAYS + 1):
        costs.time_replay(BUCKET).forward_ended()
    assert costs.time_replay(BUCKET) is not None


def test_a_second_backward_changes_no_time(costs, clock):
    timing = costs.time_eager(batch_of(800))
    finish(timing, clock, 30.0)
    timing.before_backward()
    clock.now += 500
    timing.after_backward()
    assert costs.eager_bound(Shape(800, 1, 800)) == math.inf  # not taken over yet
    costs._collect()
    assert costs.eager_bound(Shape(800, 1, 800)) == pytest.approx(30.0)


def test_replays_of_former_graphs_are_forgotten_and_eager_is_not(costs, clock):
    measure(costs, clock, [((800,), 75.0)], [(BUCKET, 200.0)] * TIMED_REPLAYS)
    finish(costs.time_replay(BUCKET), clock, 200.0)
    costs.forget_replays()
    assert not costs.eager_is_faster(Shape(800, 1, 800), BUCKET)
    measure(costs, clock, replays=[(BUCKET, 300.0)] * TIMED_REPLAYS)
    assert costs.eager_is_faster(Shape(800, 1, 800), BUCKET)


def test_a_backward_after_its_graph_was_dropped_is_not_taken_over(costs, clock):
    timing = costs.time_replay(BUCKET)
    costs.forget_replays()
    finish(timing, clock, 200.0)
    assert costs.replay_ms(BUCKET) == 0.0
    assert not costs.eager_is_faster(Shape(4, 1, 4), BUCKET)


times = st.floats(0.5, 1000)
shapes = st.builds(lambda n, f: (4 * n * f, f, 4 * n), st.integers(1, 200), st.integers(1, 8))


@given(st.lists(st.tuples(shapes, times), max_size=12), st.lists(times, min_size=1, max_size=5), shapes)
def test_a_choice_for_eager_rests_on_a_covering_measurement(eager, replays, wanted):
    clock = Stopwatch()
    costs = MeasuredCosts(clock)
    measure(costs, clock, eager, [(BUCKET, ms) for ms in replays])
    covering = [ms for shape, ms in eager if all(a >= b for a, b in zip(shape, wanted, strict=True))]
    best = min(replays[:TIMED_REPLAYS]) if len(replays) >= TIMED_REPLAYS else 0.0
    chosen = costs.eager_is_faster(Shape(*wanted), BUCKET)
    expected = bool(covering) and min(covering) * MARGIN < best
    near = bool(covering) and min(covering) * MARGIN == pytest.approx(best, rel=1e-6)
    assert chosen == expected or near


@given(st.lists(st.tuples(shapes, times), min_size=1, max_size=10), times, st.floats(1, 3))
def test_slower_eager_or_a_faster_replay_never_turns_a_replay_into_eager(eager, replay, factor):
    def chosen(eager_factor, replay_factor):
        clock = Stopwatch()
        costs = MeasuredCosts(clock)
        measure(
            costs,
            clock,
            [(s, ms * eager_factor) for s, ms in eager],
            [(BUCKET, replay * replay_factor)] * TIMED_REPLAYS,
        )
        return costs.eager_is_faster(Shape(*eager[0][0]), BUCKET)

    if not chosen(1, 1):
        assert not chosen(factor * 1.001, 1) and not chosen(1, 0.999 / factor)


class Timed:
    """A tower on graphs whose eager microbatches take `eager_ms` and whose replays take as many ms as tokens."""

    def __init__(self, clock, eager_ms, tensor_parallel=1, **options):
        self.model = new_tower()
        self.model.config.tensor_model_parallel_size = tensor_parallel
        eager = self.model.forward

        def forward(*args):
            clock.now += eager_ms / 2
            return eager(*args)

        self.model.forward = forward
        settings = {**DEFAULTS, "buckets": (32, 256), **options}
        executor = ReferenceExecutor()
        workload = VisionWorkload(self.model, VisionGraphOptions(**settings), QWEN3_VL, clock=clock)
        self.graphs = GraphManager(self.model, workload, executor)
        record = executor.record

        def timed(body, pool):
            recording = record(body, pool)
            replay, tokens = recording.forward, body._bucket.tokens

            def forward():
                clock.now += tokens
                replay()

            recording.forward = forward
            return recording

        executor.record = timed


SMALL, LARGE = [[1, 6, 6]], [[1, 16, 16]]


@pytest.fixture
def timed(clock):
    made = []

    def make(eager_ms=50.0, **options):
        made.append(Timed(clock, eager_ms, **options))
        return made[-1]

    yield make
    for one in made:
        one.graphs.detach()


def test_a_small_batch_in_a_large_bucket_runs_eager_and_is_counted(timed):
    one = timed()
    expected = results(one.model, SMALL)
    one.graphs.capture()
    found = [results(one.model, SMALL) for _ in range(TIMED_REPLAYS + 3)]
    statistics = one.graphs.statistics()
    assert statistics.fallbacks == {"eager_is_faster": 3}  # the first ones are replayed: too little was measured yet
    assert statistics.replays == TIMED_REPLAYS
    for outputs, gradients in found:
        assert_close(outputs, expected[0])
        assert_close(gradients, expected[1])


def test_replays_that_pay_go_on(timed):
    one = timed(eager_ms=1000.0)
    results(one.model, LARGE)
    one.graphs.capture()
    for _ in range(5):
        results(one.model, SMALL)
    assert one.graphs.statistics().fallbacks == {}
    assert one.graphs.statistics().replays == 5


@pytest.mark.parametrize("why", ["option", "deterministic", "tensor parallel", "no backward"])
def test_times_decide_nothing_where_they_must_not(timed, monkeypatch, why):
    if why == "deterministic":
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    one = timed(cost_fallback=why != "option", tensor_parallel=2 if why == "tensor parallel" else 1)
    results(one.model, SMALL)
    one.graphs.capture()
    for _ in range(4):
        if why == "no backward":
            with torch.no_grad():
                one.model.eval()
                one.model(torch.zeros(36, 1536), torch.tensor(SMALL))
                one.model.train()
        else:
            results(one.model, SMALL)
    assert one.graphs.statistics().fallbacks == {}


def test_without_a_gpu_nothing_is_timed():
    model = new_tower()
    workload = VisionWorkload(model, VisionGraphOptions(**DEFAULTS), QWEN3_VL)
    graphs = GraphManager(model, workload, ReferenceExecutor())
    assert graphs.workload.runs.costs is None
    graphs.detach()


def test_paused_microbatches_are_not_timed(timed, clock):
    one = timed()
    with one.graphs.paused():
        results(one.model, SMALL)
    one.graphs.capture()
    for _ in range(3):
        results(one.model, SMALL)
    assert one.graphs.statistics().fallbacks == {}
