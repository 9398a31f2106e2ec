"""Which of several processes, one on each GPU of a machine, runs which tests."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from .trainings import trainings_of

SCRIPTS = (
    "test_benchmarks",
    "test_compare",
    "test_presets",
    "test_tower_training",
)
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


@dataclass(slots=True)
class Part:
    """Tests of one process.

    Attributes:
        items: The tests.
        done: What they need done, each once, and the seconds that it takes.
    """

    items: list[pytest.Item] = field(default_factory=list)
    done: dict[Hashable, float] = field(default_factory=dict)

    def seconds_with(self, needed: Mapping[Hashable, float]) -> float:
        """Return the seconds of all that is needed once these things are as well."""
        return sum((self.done | needed).values())


def needs_of(item: pytest.Item) -> dict[Hashable, float]:
    """Return what a test needs done and the seconds that each takes: its training runs, or its whole module."""
    module = item.path.stem
    if module not in PARALLEL and (trainings := trainings_of(item)):
        return dict.fromkeys(trainings, TRAINING_S)
    return {module: SECONDS.get(module, OTHERS_S)}


def parts_of(items: Sequence[pytest.Item], count: int) -> list[Part]:
    """Give tests to parts, the longest first, each to the part that ends first with it.

    Modules stay together, but for tests of training runs: where two need the same run, it is done in one part or in
    both, whichever ends first.
    """
    together: dict[frozenset[Hashable], list[pytest.Item]] = {}
    for item in items:
        together.setdefault(frozenset(needs_of(item)), []).append(item)
    units = [(needs_of(tests[0]), tests) for tests in together.values()]
    parts = [Part() for _ in range(count)]
    for needed, tests in sorted(units, key=lambda unit: sum(unit[0].values()), reverse=True):
        part = min(parts, key=lambda each: each.seconds_with(needed))
        part.items += tests
        part.done |= needed
    return parts


def part_of(items: Sequence[pytest.Item], part: str) -> list[pytest.Item]:
    """Return the tests of one of several processes, `NUMBER/COUNT`, in their order."""
    number, count = map(int, part.split("/"))
    kept = set(map(id, parts_of(items, count)[number].items))
    return [item for item in items if id(item) in kept]
