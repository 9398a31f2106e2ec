from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from .mixes import FITTING, IMAGES, ONE_OVER, ONE_UNIT, TOO_MANY_FRAMES
from .towers import assert_close, forward, graphs_on, new_tower, poison, results, tower

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
