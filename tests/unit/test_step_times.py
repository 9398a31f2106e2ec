"""Where a profiled step's time went, from spans as a profiler gives them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.performance.measuring.measure import family
from scripts.performance.measuring.step_times import END, IDLE, OPTIMIZER, PARTS, parts_of

MARKER = "at::cuda::(anonymous namespace)::spin_kernel(long)"
GEMM, ADD, NCCL = "nvjet_tst_128x256", "vectorized_elementwise_kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


def markers(*starts):
    return [(start, start + 1, MARKER) for start in starts]


def test_each_moment_is_of_the_part_that_began_last_and_idle_where_nothing_ran():
    spans = [*markers(0, 1000, 4000, 9000), (1000, 3000, GEMM), (2000, 3500, NCCL), (4500, 8500, ADD)]
    found = parts_of(spans, ["between", "vision", OPTIMIZER, END])
    expected = {"vision": 2.5, "between": 0.0, "language model": 0.0, OPTIMIZER: 4.0, IDLE: 2.5}
    assert found["parts_ms"] == pytest.approx(expected)
    assert found["idle_share"] == pytest.approx(2.5 / 9) and found["gpu_busy_ms"] == pytest.approx(6.5)
    assert found["families"] == pytest.approx({OPTIMIZER: 4.0, "matrix products": 2.0, "communication": 1.5})
    assert found["kernels"] == 3


def test_gaps_are_told_by_what_ran_before_and_after():
    spans = [*markers(0, 1000, 4000, 9000), (1000, 3000, GEMM), (2000, 3500, NCCL), (4500, 8500, ADD)]
    gaps = parts_of(spans, ["between", "vision", OPTIMIZER, END])["idle_gaps"]
    assert [(gap["part"], gap["after"], gap["before"], gap["ms"]) for gap in gaps] == [
        ("between", END, GEMM, pytest.approx(1.0)),
        (OPTIMIZER, NCCL, ADD, pytest.approx(1.0)),
        (OPTIMIZER, ADD, END, pytest.approx(0.5)),
    ]


def test_a_kernel_over_a_boundary_counts_in_both_parts_and_what_is_outside_the_step_nowhere():
    spans = [*markers(0, 1000, 2000), (-500, 200, GEMM), (800, 1500, GEMM), (1900, 2600, GEMM)]
    found = parts_of(spans, ["vision", "language model", END])["parts_ms"]
    assert (found["vision"], found["language model"]) == pytest.approx((0.4, 0.6))


def test_communication_is_no_work_of_the_optimizer_and_no_reduction():
    found = parts_of([*markers(0, 1000), (0, 600, NCCL), (0, 400, ADD)], [OPTIMIZER, END])
    assert found["families"] == pytest.approx({"communication": 0.6, OPTIMIZER: 0.4})
    for name in (NCCL, "ncclDevKernel_SendRecv", "ncclDevKernel_AllGather_RING_LL"):
        assert family(name) == "communication"
    assert family("void at::native::reduce_kernel<512>") == "reductions"


def test_another_number_of_markers_is_an_error():
    with pytest.raises(ValueError, match="2 markers of 3"):
        parts_of(markers(0, 5), ["vision", "between", END])


times = st.integers(0, 10_000)
kernels = st.lists(st.tuples(times, st.integers(1, 3000)), max_size=30)


@given(st.sets(times, min_size=2, max_size=12), kernels, st.data())
def test_parts_add_up_to_the_step_and_busy_time_to_the_rest_of_idle(starts, work, data):
    starts = sorted(starts)
    marks = [data.draw(st.sampled_from(PARTS[:-1])) for _ in starts[1:]]
    spans = [*markers(*starts), *((start, start + length, GEMM) for start, length in work)]
    found = parts_of(spans, [*marks, END])
    step = (starts[-1] - starts[0]) / 1e3
    assert sum(found["parts_ms"].values()) == pytest.approx(step)
    assert found["parts_ms"][IDLE] == pytest.approx(step - found["gpu_busy_ms"], abs=1e-9)
    assert sum(gap["ms"] for gap in found["idle_gaps"]) <= found["parts_ms"][IDLE] + 1e-9
    assert found["idle_share"] * step == pytest.approx(found["parts_ms"][IDLE], abs=1e-9)
