"""Which of several processes, one on each GPU of a machine, runs which tests."""

from collections.abc import Hashable, Sequence

import pytest

from .trainings import trainings_of

SCRIPTS = ("test_benchmarks", "test_compare", "test_presets", "test_tower_training")
# Runs over several GPUs.
PARALLEL = ("test_parallel", "test_packed_parallel")
# Seconds of modules on an H200, without training runs, where cases have gone since by the share of those that are left.
# Those that `./run gpu-test` leaves out take none.
SECONDS = {
    **dict.fromkeys((*SCRIPTS, *PARALLEL), 0.0),
    "test_encoders": 160.0,
    "test_packed_offload": 75.0,
    "test_packed_fp8": 75.0,
    "test_packed_default": 75.0,
    "test_segment_attention": 75.0,
    "test_captured_experts": 55.0,
    "test_small_recipe": 65.0,
    "test_delta_nets": 60.0,
    "test_packed_mamba": 60.0,
    "test_packed": 55.0,
    "test_memory_release": 45.0,
    "test_offload": 45.0,
    "test_changed_models": 30.0,
    "test_capture": 20.0,
    "test_between": 20.0,
    "test_parity": 25.0,
    "test_side_stream": 15.0,
}
OTHERS_S = 10.0
# A training run's share of the time that some thirty took, several at once, imports included.
TRAINING_S = 7.0


def needs_of(item: pytest.Item) -> dict[Hashable, float]:
    """Return what a test needs done and the seconds that each takes: its training runs, or its whole module."""
    module = item.path.stem
    if module not in PARALLEL and (trainings := trainings_of(item)):
        return dict.fromkeys(trainings, TRAINING_S)
    return {module: SECONDS.get(module, OTHERS_S)}


def part_of(items: Sequence[pytest.Item], part: str) -> list[pytest.Item]:
    """Return the tests of one of several processes, `NUMBER/COUNT`, in their order.

    The longest are given first, to the process that ends first with them. Modules stay together, but for tests of
    training runs: where two need the same run, one process does it or both, whichever ends first.
    """
    number, count = map(int, part.split("/"))
    together: dict[frozenset[Hashable], list[pytest.Item]] = {}
    for item in items:
        together.setdefault(frozenset(needs_of(item)), []).append(item)
    kept: list[set[int]] = [set() for _ in range(count)]
    done: list[dict[Hashable, float]] = [{} for _ in range(count)]
    units = [(needs_of(tests[0]), tests) for tests in together.values()]
    for needed, tests in sorted(units, key=lambda unit: sum(unit[0].values()), reverse=True):
        ends = [sum((each | needed).values()) for each in done]
        first = ends.index(min(ends))
        kept[first] |= set(map(id, tests))
        done[first] |= needed
    return [item for item in items if id(item) in kept[number]]
