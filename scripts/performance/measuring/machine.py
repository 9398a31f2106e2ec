"""What a benchmark's runs get of a machine: GPUs, and cores of their own."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

# Of all cores, what processes that import get: they are as many as train, and mostly of one thread.
IMPORTING = 1 / 4
# With fewer for each GPU, cores are not told apart.
FEWEST_CORES = 4


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores by what runs on them.

    Attributes:
        importing: Those of processes that import.
        training: Those of the processes that train on each GPU, by its index.
    """

    importing: tuple[int, ...]
    training: tuple[tuple[int, ...], ...]

    def of_ranks(self, ranks: int, devices: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the cores of each rank of a run on these GPUs."""
        return [self.training[devices[rank % len(devices)]] for rank in range(ranks)]


def divide(cores: Collection[int], gpus: int) -> Cores:
    """Return a part of the cores for processes that import, and an even share of the others for each GPU.

    Where a GPU would get fewer than `FEWEST_CORES`, everything runs on all.
    """
    ordered = tuple(sorted(cores))
    importing = int(len(ordered) * IMPORTING)
    each = (len(ordered) - importing) // gpus
    if each < FEWEST_CORES:
        return Cores(ordered, (ordered,) * gpus)
    shares = tuple(ordered[first : first + each] for first in range(0, each * gpus, each))
    return Cores(ordered[each * gpus :], shares)


def keep_to(process: Any, cores: Sequence[Collection[int]]) -> None:
    """Keep a run's processes to cores, by rank; where the system does not allow it, say so and go on."""
    try:
        process.keep_to(cores)
    except OSError as error:
        print(f"runs have no cores of their own: {error}", flush=True)


def gpus_here() -> int:
    """Return how many GPUs this process sees."""
    import torch

    return torch.cuda.device_count()
